"""Measure whether a document sees another one.

Some documents are replaced, and the others must not change by one bit; some documents have a loss, and the others must
get no gradient at all. Two runs ([`replacements`]) and one loss ([`losses`]) tell every two documents apart, in both
directions; fewer runs ([`alternating`]) only neighbours.

Some kernels of accelerators give other bits in every run of the same tokens. So a change counts as a leak only if it
is larger than the changes between repeated runs, and those must be no larger than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, compress
from typing import NamedTuple, TypeAlias

import torch

from ..comparison import TOLERANCES, nearest
from .compare import Differences, judged_layers, largest, relative_difference, share
from .documents import Documents, losses, replacements
from .engine import layer_differences
from .modes import restoring_modes
from .probe import Probe
from .runs import Arrangement, Key, Result, Run, Trace, dtype_of, random_losses, take_gradients
from .subject import Subject, rounding_dtype

# Two runs between which a document changed are repeated this many times.
_REPEATS = 3
# The documents that each of two runs replaces.
Replaced: TypeAlias = "tuple[tuple[bool, ...], tuple[bool, ...]]"


class Isolation(NamedTuple):
    """Changes that must not happen."""

    # Change of the LM head's input, or of the logits, for documents that stay, in units of `scale`; with experts, the
    # part that grouping tokens by expert, which rounds sums in another way, does not explain.
    forward: float
    regrouped: float  # with experts, the whole change
    unsteady: float  # change between repeated runs of the same tokens
    gradients: float | None  # of embeddings without a loss, in standard deviations of those with one
    which: Replaced  # by the two runs with the largest change between them
    where: Arrangement


def measure_isolation(
    probe: Probe,
    arrangement: Arrangement,
    runs: Sequence[tuple[bool, ...]],
    noise: Differences,
    scale: float,
    *,
    backward: bool,
    both: bool,
) -> Isolation:
    """Measure isolation of the documents in one arrangement, with gradients if `backward`.

    Each of the `runs` replaces these of the documents. `noise` is the rounding of every layer, `scale` the standard
    deviation of the LM head's input. With `both` every second run, or one more, is in evaluation mode, and a
    difference from training mode counts; a single run measures nothing else.
    """
    subject, documents = probe.subject, arrangement.documents
    trained = [[documents[i] for i in own] for own in losses(len(documents), len(runs))] if backward else []
    # The first output of each document, and of its replacement, with the number of that run.
    met: dict[tuple[int, bool], tuple[Documents, int]] = {}
    regrouping = _Regrouping(probe, arrangement, noise) if subject.regroups and len(runs) > 1 else None
    worst_moved, regrouped, unsteady, leaked, worst_runs = 0.0, 0.0, 0.0, None, (runs[0], runs[-1])
    mixes = both and not backward and regrouping is None and len(runs) > 1

    def run(number: int) -> Run:
        tokens = probe.replaced(documents, runs[number])
        if not backward:
            return _forward(probe, arrangement, tokens, evaluated=mixes and number % 2 > 0)
        with subject.frozen(), probe.embedded() as embedded:
            found = probe.packed(arrangement, tokens)
            take_gradients(random_losses({i: found[i] for i in trained[number]}, probe.seed), subject.loss_scale)
        return arrangement.with_gradients({i: own.detached() for i, own in found.items()}, embedded)

    for number, which in enumerate(runs):
        found = run(number)
        # `stay` ran before with the same tokens, while other documents were replaced. They must give the same bits.
        cases = list(zip(documents, which, strict=True))
        stay = {i: (met[i, replaced], found[i].tensors) for i, replaced in cases if (i, replaced) in met}
        off = [(share(largest(now, before), scale), since) for (before, since), now in stay.values()]
        moved, since = max(off, default=(0.0, 0))
        for i, replaced in cases:
            met.setdefault((i, replaced), (found[i].tensors, number))
        if regrouping is not None:
            unexplained = regrouping.measure(which)
            if not _is_steady(probe.device) and subject.anywhere(unexplained > 0):
                unexplained = min(unexplained, regrouping.measure(which))
            regrouped = max(regrouped, moved)
            # Each rank must call `anywhere` equally often, so all of them ask together.
            moved = unexplained if subject.anywhere(moved > 0) else moved
        elif not _is_steady(probe.device) and subject.anywhere(not moved <= 0):
            moved, varied = (share(size, scale) for size in _repeated(subject, stay, number, run))
            unsteady = max(unsteady, varied)
        # Written so that it is true for NaN as well.
        if not moved <= worst_moved:
            worst_moved, worst_runs = moved, (runs[since], which)
        gradients = {i: own.gradient for i, own in found.items() if own.gradient is not None}
        if gradients:
            usual = float(torch.cat([gradients[i].float() for i in trained[number]]).std())
            others = [gradient for i, gradient in gradients.items() if i not in trained[number]]
            # Multiplied by 0 instead of zeros, so that NaN stays NaN and counts as infinite.
            leaked = max(leaked or 0.0, share(largest(others, (gradient * 0 for gradient in others)), usual))
    if both and not mixes:
        evaluated = _forward(probe, arrangement, evaluated=True)
        worst_moved = max(worst_moved, *(largest(own.tensors, met[i, False][0]) for i, own in evaluated.items()))
    return Isolation(worst_moved, regrouped, unsteady, leaked, worst_runs, arrangement)


def _forward(
    probe: Probe, arrangement: Arrangement, tokens: Documents | None = None, *, evaluated: bool = False
) -> Run:
    """Run packed documents as their mode does: with a graph in training mode, without one in evaluation mode.

    If `evaluated`, the model is in evaluation mode for this run.
    """
    with restoring_modes(probe.model):
        if evaluated:
            probe.model.eval()
        if not probe.model.training:
            with torch.no_grad():
                return probe.packed(arrangement, tokens)
        with probe.subject.frozen(), probe.embedded():
            return {i: own.detached() for i, own in probe.packed(arrangement, tokens).items()}


def _is_steady(device: torch.device) -> bool:
    return device.type == "cpu"  # all its kernels give the same bits in every run of the same tokens


def _repeated(
    subject: Subject,
    stay: dict[int, tuple[tuple[Documents, int], Documents]],
    number: int,
    run: Callable[[int], Run],
) -> tuple[float, float]:
    """Repeat two runs; return how far documents move between them beyond what repeats differ, and what repeats differ.

    `stay` holds for each document that stays its results in an earlier run, with the number of that run, and those of
    run `number`.
    """
    # All ranks take part in every run, so they repeat the same ones.
    numbers = sorted({since for (_, since), _ in stay.values()} | {number})
    again = {i: [run(i) for _ in range(_REPEATS)] for i in numbers}
    moved, varied = 0.0, 0.0
    for document, ((before, since), now) in stay.items():
        both = ((before, since), (now, number))
        earlier, later = ([first, *(found[document].tensors for found in again[i])] for first, i in both)
        between = min(largest(a, b) for a in earlier for b in later)
        within = max(largest(a, b) for group in (earlier, later) for a, b in combinations(group, 2))
        # Not the measured noise, as it was measured with the same kernels. Written so that a NaN stays a leak.
        pairs = zip(now, before, strict=True)
        floor = TOLERANCES[rounding_dtype(subject.model, now[-1].dtype)].outputs
        is_rounding = all(relative_difference(a, b, typical=subject.chooses) <= floor for a, b in pairs)
        if not (between <= within and is_rounding):
            moved = max(moved, between, 0.0 if is_rounding else largest(now, before))
        varied = max(varied, within)
    return moved, varied


class _Regrouping:
    """Search for changes that regrouping tokens, usually by expert, does not explain.

    Each layer gets the same input as in an earlier run of the document. Its token mixer, which comes before the
    experts, must give the same bits again, and so must its router for the same bits. The layer's output may differ by
    rounding. No output is replaced.
    """

    def __init__(self, probe: Probe, arrangement: Arrangement, noise: Differences) -> None:
        self.subject, self.probe, self.arrangement, self.noise = probe.subject, probe, arrangement, noise
        self.met: dict[tuple[int, bool], Result] = {}

    @torch.no_grad()
    def measure(self, which: Sequence[bool]) -> float:
        """Return the change beyond rounding in this run, 0 if there is none."""
        documents = self.arrangement.documents
        numbered = list(zip(documents, which, strict=True))
        before = {i: self.met[i, replaced] for i, replaced in numbered if (i, replaced) in self.met}
        tokens = self.probe.replaced(documents, which)
        run = self.probe.run_packed(self.arrangement, None, before, tokens=tokens, free=True)
        for i, replaced in numbered:
            self.met.setdefault((i, replaced), run[i])
        if not before:
            return 0.0
        moved = 0.0
        for i, own in before.items():
            after = run[i].trace
            for key, value in own.trace.items():
                if key in after and value.shape == after[key].shape and _must_repeat(key, own.trace, after):
                    usual = float(value.float().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) or 1.0
                    moved = max(moved, largest([after[key]], [value]) / usual)
        found = layer_differences({i: run[i] for i in before}, before, typical=self.subject.chooses)
        beyond = nearest(judged_layers(found, self.noise, rounding_dtype(self.subject.model, dtype_of(run))))
        return max(moved, 0.0 if beyond.excess <= 1 else beyond.difference)


def _must_repeat(key: Key, before: Trace, after: Trace) -> bool:
    """Tell whether an output must be the same bit for bit: a mixer's or a router's with the same input.

    Layers may get more than the input that is replaced, such as the states of earlier passes of a loop.
    """
    given = Key("entered", key.module, key.call)
    if given not in before or given not in after:
        return key.kind == "left"
    return key.kind != "entered" and torch.equal(before[given], after[given])


@torch.no_grad()
def measure_control(probe: Probe) -> float:
    """Measure how far the logits of documents move when others are replaced and the call has no boundaries.

    They must move. The unit is the logits' standard deviation. Positions that restart are left out as well, as
    transformers reads boundaries from them.
    """
    which = replacements(len(probe.lengths))[1]
    runs = (
        probe.packed(probe.row, probe.replaced(probe.row.documents, replaced), without_boundaries=True)
        for replaced in ((False,) * len(which), which)
    )
    before, after = ([own.tensors[0] for own in run.values()] for run in runs)
    scale = float(torch.cat(before).float().std())
    stay = [not replaced for replaced in which]
    return share(largest(compress(after, stay), compress(before, stay)), scale)
