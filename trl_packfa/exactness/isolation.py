"""Does any document see another? Some are replaced, the others must not move by one bit; some have a loss, the others
must get no gradient at all.

Every two documents are told apart by some run, in either direction ([`replacements`]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .compare import differences, largest, relative_logits, worst
from .documents import Documents, replacements
from .following import Key
from .parity import Differences, run_packed
from .probe import Arrangement, Probe
from .subject import Subject, compute_dtype

_LOGITS = Key("logits", "the LM head", 0)


class Isolation(NamedTuple):
    """What moved though it must not.

    Attributes:
        forward (`float`): of the logits of documents that stay, in `scale`; with experts, what regrouping does not
            explain.
        regrouped (`float`): what grouping tokens by expert moved, as that rounds sums otherwise.
        gradients (`float` or `None`): of embeddings without a loss, in standard deviations of those with one.
        base (`list[torch.Tensor]`): logits of the documents as they are.
        which (`tuple[bool, ...]`): the documents that were replaced when most moved.
    """

    forward: float
    regrouped: float
    gradients: float | None
    base: Documents
    which: tuple[bool, ...]


def measure_isolation(
    subject: Subject, probe: Probe, noise: Differences, scale: float, *, rows: bool, backward: bool
) -> Isolation:
    """Isolation of the documents in one row or in several, with gradients or without; `noise` is what rounding makes
    of every layer, `scale` the logits' standard deviation."""
    arrangement = probe.rows if rows else probe.row
    run = probe.in_rows if rows else probe.packed
    forward = _with_gradients if backward else _without_gradients
    everything = range(len(probe.lengths))
    base, found = forward(probe, run, probe.tokens, everything, arrangement)
    runs = replacements(len(probe.lengths))
    worst_moved, regrouped, leaked, worst_which = 0.0, 0.0, (None if found is None else 0.0), runs[0]
    for which in runs:
        stay = [i for i in everything if not which[i]]
        changed = [i for i in everything if which[i]]
        logits, gradients = forward(probe, run, probe.replaced(which), changed, arrangement)
        moved = largest((logits[i] for i in stay), (base[i] for i in stay)) / scale
        if subject.regroups and subject.anywhere(moved > 0):
            regrouped = max(regrouped, moved)
            moved = _unexplained(subject, probe, arrangement, run, which, noise)
        if not moved <= worst_moved:
            worst_moved, worst_which = moved, which
        if gradients is not None and leaked is not None:
            usual = float(torch.cat([gradients[i].float() for i in changed]).std())
            leaked = max(leaked, largest((gradients[i] for i in stay), (gradients[i] * 0 for i in stay)) / usual)
    return Isolation(worst_moved, regrouped, leaked, base, worst_which)


def _with_gradients(
    probe: Probe,
    run: Callable[[Documents], Documents],
    tokens: Documents,
    losses: Sequence[int],
    arrangement: Arrangement,
) -> tuple[Documents, Documents | None]:
    return probe.embedding_gradients(run, tokens, losses, arrangement)


@torch.no_grad()
def _without_gradients(
    probe: Probe,
    run: Callable[[Documents], Documents],
    tokens: Documents,
    losses: Sequence[int],
    arrangement: Arrangement,
) -> tuple[Documents, Documents | None]:
    return run(tokens), None


@torch.no_grad()
def _unexplained(
    subject: Subject,
    probe: Probe,
    arrangement: Arrangement,
    run: Callable[[Documents], Documents],
    which: Sequence[bool],
    noise: Differences,
) -> float:
    """What moved though tokens were not merely regrouped, by expert as a rule.

    Each layer of the documents that stay is handed what it got before. Its token mixer, which comes before the
    experts, must then give the same bits; what leaves the layer may differ by rounding.
    """
    base_logits, base = run_packed(subject, probe, arrangement, run, None)
    handed = [None if replaced else trace for replaced, trace in zip(which, base.traces, strict=True)]
    logits, followed = run_packed(subject, probe, arrangement, run, handed, tokens=probe.replaced(which))
    moved, found = 0.0, {}
    for document, replaced in enumerate(which):
        if replaced:
            continue
        before, after = base.traces[document], followed.traces[document]
        for key in before:
            if key.kind == "left" and key in after and before[key].shape == after[key].shape:
                usual = float(before[key].float().square().mean().sqrt()) or 1.0
                moved = max(moved, largest([after[key]], [before[key]]) / usual)
        for (key, _), difference in differences([after], [before], typical=subject.chooses).items():
            found[key, document] = difference
        found[_LOGITS, document] = relative_logits(logits[document], base_logits[document], typical=subject.chooses)
    beyond, _ = worst(found, noise, compute_dtype(subject.model, base_logits[0].dtype))
    return max(moved, 0.0 if beyond.excess <= 1 else beyond.difference)


@torch.no_grad()
def measure_control(probe: Probe, scale: float) -> float:
    """What documents move when others are replaced and no boundaries are told, in `scale`: must be seen."""
    which = replacements(len(probe.lengths))[0]
    before = probe.packed(probe.tokens, boundaries=False)
    after = probe.packed(probe.replaced(which), boundaries=False)
    stay = [i for i, replaced in enumerate(which) if not replaced]
    return largest((after[i] for i in stay), (before[i] for i in stay)) / scale


@torch.no_grad()
def first_leak(probe: Probe, which: Sequence[bool]) -> str | None:
    """Name of the first module whose output for a document that stays moves when the others are replaced."""
    before, after = probe.outputs_packed(probe.tokens), probe.outputs_packed(probe.replaced(which))
    stay = [i for i, replaced in enumerate(which) if not replaced]
    moved = (
        name
        for name in before
        if name in after and largest((after[name][i] for i in stay), (before[name][i] for i in stay)) > 0
    )
    return next(moved, None)
