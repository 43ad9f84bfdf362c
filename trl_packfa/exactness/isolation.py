"""Does any document see another? Some are replaced, the others must not move by one bit; some have a loss, the others
must get no gradient at all.

Every two documents are told apart by two runs ([`replacements`]) and by one loss ([`losses`]), in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from .compare import differences, largest, relative_logits, share, worst
from .documents import Documents, losses, replacements
from .following import Key, Trace
from .parity import Differences, run_packed
from .probe import Arrangement, Probe
from .subject import Subject, rounding_dtype

_LOGITS = Key("logits", "the LM head", 0)
# The documents that each of two runs replaces.
Replaced: TypeAlias = "tuple[tuple[bool, ...], tuple[bool, ...]]"


class Isolation(NamedTuple):
    """What moved though it must not.

    Attributes:
        forward (`float`): of the logits of documents that stay, in `scale`; with experts, what regrouping does not
            explain.
        regrouped (`float`): what grouping tokens by expert moved, as that rounds sums otherwise.
        gradients (`float` or `None`): of embeddings without a loss, in standard deviations of those with one.
        base (`list[torch.Tensor]`): logits of the documents as they are.
        which (`tuple`): the documents that were replaced in the two runs between which most moved.
    """

    forward: float
    regrouped: float
    gradients: float | None
    base: Documents
    which: Replaced


def measure_isolation(
    subject: Subject, probe: Probe, noise: Differences, scale: float, *, rows: bool, backward: bool
) -> Isolation:
    """Isolation of the documents in one row or in several, with gradients or without; `noise` is what rounding makes
    of every layer, `scale` the logits' standard deviation."""
    arrangement = probe.rows if rows else probe.row
    run = probe.in_rows if rows else probe.packed
    forward = partial(_with_gradients, scale=subject.loss_scale) if backward else _without_gradients
    everything = range(len(probe.lengths))
    runs = replacements(len(probe.lengths))
    trained = losses(len(probe.lengths), len(runs)) if backward else [[]] * len(runs)
    # What each document gave when it, or what replaces it, was first met, and in which run.
    met: dict[tuple[int, bool], tuple[torch.Tensor, int]] = {}
    regrouping = _Regrouping(subject, probe, arrangement, run, noise) if subject.regroups else None
    worst_moved, regrouped, leaked, worst_runs = 0.0, 0.0, None, (runs[0], runs[-1])
    for number, which in enumerate(runs):
        logits, gradients = forward(probe, run, probe.replaced(which), trained[number], arrangement)
        # Met before with the same tokens, while others in the row were replaced: it must give the same bits.
        stay = [i for i in everything if (i, which[i]) in met]
        off = [(share(largest([logits[i]], [met[i, which[i]][0]]), scale), met[i, which[i]][1]) for i in stay]
        moved, since = max(off, default=(0.0, 0))
        for i in everything:
            met.setdefault((i, which[i]), (logits[i], number))
        if regrouping is not None:
            unexplained = regrouping.measure(which)
            regrouped = max(regrouped, moved)
            # Asked of all ranks together, as each must call `anywhere` as often as the others.
            moved = unexplained if subject.anywhere(moved > 0) else moved
        # True for NaN as well.
        if not moved <= worst_moved:
            worst_moved, worst_runs = moved, (runs[since], which)
        if gradients is not None:
            usual = float(torch.cat([gradients[i].float() for i in trained[number]]).std())
            others = [gradients[i] for i in everything if i not in trained[number]]
            # Times 0, not zeros: NaN stays NaN, and counts as infinite.
            leaked = max(leaked or 0.0, share(largest(others, (gradient * 0 for gradient in others)), usual))
    return Isolation(worst_moved, regrouped, leaked, [met[i, False][0] for i in everything], worst_runs)


def _with_gradients(
    probe: Probe,
    run: Callable[[Documents], Documents],
    tokens: Documents,
    losses: Sequence[int],
    arrangement: Arrangement,
    *,
    scale: float,
) -> tuple[Documents, Documents | None]:
    return probe.embedding_gradients(run, tokens, losses, arrangement, scale=scale)


@torch.no_grad()
def _without_gradients(
    probe: Probe,
    run: Callable[[Documents], Documents],
    tokens: Documents,
    losses: Sequence[int],
    arrangement: Arrangement,
) -> tuple[Documents, Documents | None]:
    return run(tokens), None


class _Regrouping:
    """What moves though tokens are not merely regrouped, by expert as a rule.

    Each layer of a document that was met before is handed what it got then. Its token mixer, which comes before the
    experts, must give the same bits again; what leaves the layer may differ by rounding.
    """

    def __init__(
        self,
        subject: Subject,
        probe: Probe,
        arrangement: Arrangement,
        run: Callable[[Documents], Documents],
        noise: Differences,
    ) -> None:
        self.subject, self.probe, self.arrangement, self.run, self.noise = subject, probe, arrangement, run, noise
        self.met: dict[tuple[int, bool], tuple[torch.Tensor, Trace]] = {}

    @torch.no_grad()
    def measure(self, which: Sequence[bool]) -> float:
        """What moved beyond rounding in this run, 0 where nothing did."""
        before = {i: self.met[i, replaced] for i, replaced in enumerate(which) if (i, replaced) in self.met}
        handed: list[Trace | None] = [before[i][1] if i in before else None for i in range(len(which))]
        logits, followed = run_packed(
            self.subject, self.probe, self.arrangement, self.run, handed, tokens=self.probe.replaced(which)
        )
        for i, replaced in enumerate(which):
            self.met.setdefault((i, replaced), (logits[i], followed.traces[i]))
        if not before:
            return 0.0
        moved, found = 0.0, {}
        typical = self.subject.chooses
        for i, (expected, trace) in before.items():
            after = followed.traces[i]
            for key in trace:
                if key.kind == "left" and key in after and trace[key].shape == after[key].shape:
                    usual = float(trace[key].float().square().mean().sqrt()) or 1.0
                    moved = max(moved, largest([after[key]], [trace[key]]) / usual)
            for (key, _), difference in differences([after], [trace], typical=typical).items():
                found[key, i] = difference
            found[_LOGITS, i] = relative_logits(logits[i], expected, typical=typical)
        beyond, _ = worst(found, self.noise, rounding_dtype(self.subject.model, logits[0].dtype))
        return max(moved, 0.0 if beyond.excess <= 1 else beyond.difference)


@torch.no_grad()
def measure_control(probe: Probe, scale: float, *, told: Sequence[str] = ()) -> float:
    """Measure how far documents move, in `scale`, when others are replaced and no boundaries are told.

    They must move. Positions that restart would tell boundaries too, as transformers makes boundaries of them.
    """
    which = replacements(len(probe.lengths))[1]
    before = probe.packed(probe.tokens, told=told)
    after = probe.packed(probe.replaced(which), told=told)
    stay = [i for i, replaced in enumerate(which) if not replaced]
    return share(largest((after[i] for i in stay), (before[i] for i in stay)), scale)


@torch.no_grad()
def first_leak(probe: Probe, which: Replaced, *, rows: bool) -> str | None:
    """Name of the first module whose output for a document moves between two runs that have it alike."""
    before, after = (probe.outputs_packed(probe.replaced(replaced), rows=rows) for replaced in which)
    stay = [i for i, (one, other) in enumerate(zip(*which, strict=True)) if one == other]
    moved = (
        name
        for name in before
        if name in after and largest((after[name][i] for i in stay), (before[name][i] for i in stay)) > 0
    )
    return next(moved, None)
