"""Measure whether a document sees another one.

In the forward pass some documents are replaced, and the others must not change by one bit. In the backward pass some
documents have a loss, and the others must get no gradient at all. Two runs ([`replacements`]) and one loss
([`losses`]) tell every two documents apart, in both directions.

Some kernels of accelerators give other bits in every run of the same tokens. So a change counts as a leak only if it
is larger than the changes between repeated runs, and those must be no larger than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeAlias

import torch

from .compare import FLOORS, differences, largest, relative_difference, relative_logits, share, worst
from .documents import Documents, alternating, losses, replacements
from .engine import LOGITS, STATES, Differences
from .following import Trace
from .parity import run_packed
from .probe import Arrangement, Probe
from .subject import Subject, rounding_dtype

# Two runs between which a document changed are repeated this many times.
_REPEATS = 3
# The documents that each of two runs replaces.
Replaced: TypeAlias = "tuple[tuple[bool, ...], tuple[bool, ...]]"


class Isolation(NamedTuple):
    """Changes that must not happen.

    Attributes:
        forward (`float`): change of the LM head's input for documents that stay, in units of `scale`; with experts,
        the part that regrouping does not explain.
        regrouped (`float`): change from grouping tokens by expert, which rounds sums in another way.
        unsteady (`float`): change between repeated runs of the same tokens.
        gradients (`float` or `None`): gradient of embeddings without a loss, in standard deviations of those with one.
        which (`tuple`): the documents that were replaced in the two runs with the largest change between them.
        where ([`Arrangement`]): the arrangement in which they were packed.
    """

    forward: float
    regrouped: float
    unsteady: float
    gradients: float | None
    which: Replaced
    where: Arrangement


def measure_isolation(
    probe: Probe, arrangement: Arrangement, noise: Differences, scale: float, *, backward: bool, pairs: bool = True
) -> Isolation:
    """Measure isolation of the documents in one arrangement, with gradients if `backward`.

    `noise` is the rounding of every layer, `scale` the standard deviation of the LM head's input. Without `pairs` only
    documents at an even place are told apart from those at an odd one, not every two.
    """
    subject, documents = probe.subject, arrangement.documents
    everything = range(len(documents))
    runs = replacements(len(documents)) if pairs else alternating(len(documents))
    trained = losses(len(documents), len(runs)) if backward else [[]] * len(runs)
    # The first output of each document, and of its replacement, with the number of that run.
    met: dict[tuple[int, bool], tuple[torch.Tensor, int]] = {}
    regrouping = _Regrouping(probe, arrangement, noise) if subject.regroups else None
    worst_moved, regrouped, unsteady, leaked, worst_runs = 0.0, 0.0, 0.0, None, (runs[0], runs[-1])

    def run(number: int) -> tuple[Documents, Documents | None]:
        tokens = probe.replaced(documents, runs[number])
        if not backward:
            with torch.no_grad():
                return [*probe.packed(arrangement, tokens).states.values()], None
        with subject.frozen(), probe.embedded() as embedded:
            found = probe.packed(arrangement, tokens)
            probe.backward(found, [documents[i] for i in trained[number]], scale=subject.loss_scale)
        return [states.detach() for states in found.states.values()], arrangement.gradients(embedded)

    for number, which in enumerate(runs):
        states, gradients = run(number)
        # These documents ran before with the same tokens, while others were replaced. They must give the same bits.
        stay = [i for i in everything if (i, which[i]) in met]
        off = [(share(largest([states[i]], [met[i, which[i]][0]]), scale), met[i, which[i]][1]) for i in stay]
        moved, since = max(off, default=(0.0, 0))
        for i in everything:
            met.setdefault((i, which[i]), (states[i], number))
        if regrouping is not None:
            unexplained = regrouping.measure(which)
            if not _is_steady(probe.device) and subject.anywhere(unexplained > 0):
                unexplained = min(unexplained, regrouping.measure(which))
            regrouped = max(regrouped, moved)
            # Each rank must call `anywhere` equally often, so all of them ask together.
            moved = unexplained if subject.anywhere(moved > 0) else moved
        elif not _is_steady(probe.device) and subject.anywhere(not moved <= 0):
            kept = [(met[i, which[i]], states[i]) for i in stay]
            moved, varied = (share(found, scale) for found in _repeated(subject, kept, stay, number, run))
            unsteady = max(unsteady, varied)
        # Written so that it is true for NaN as well.
        if not moved <= worst_moved:
            worst_moved, worst_runs = moved, (runs[since], which)
        if gradients is not None:
            usual = float(torch.cat([gradients[i].float() for i in trained[number]]).std())
            others = [gradients[i] for i in everything if i not in trained[number]]
            # Multiplied by 0 instead of zeros, so that NaN stays NaN and counts as infinite.
            leaked = max(leaked or 0.0, share(largest(others, (gradient * 0 for gradient in others)), usual))
    return Isolation(worst_moved, regrouped, unsteady, leaked, worst_runs, arrangement)


def _is_steady(device: torch.device) -> bool:
    """Tell whether all kernels of a device give the same bits in every run of the same tokens."""
    return device.type == "cpu"


def _repeated(
    subject: Subject,
    pairs: Sequence[tuple[tuple[torch.Tensor, int], torch.Tensor]],
    places: Sequence[int],
    number: int,
    run: Callable[[int], tuple[Documents, Documents | None]],
) -> tuple[float, float]:
    """Repeat two runs; return how far documents move between them beyond what repeats differ, and what repeats differ.

    `pairs` holds for each document that stays its output in an earlier run, with the number of that run, and its
    output now; `places` its place. `number` is that of this run, and `run` repeats a run by its number.
    """
    # All ranks take part in every run, so they repeat the same ones.
    numbers = sorted({since for (_, since), _ in pairs} | {number})
    again = {i: [run(i)[0] for _ in range(_REPEATS)] for i in numbers}
    moved, varied, dtype = 0.0, 0.0, rounding_dtype(subject.model, pairs[0][1].dtype)
    for place, ((before, since), now) in zip(places, pairs, strict=True):
        both = ((before, since), (now, number))
        earlier, later = ([first, *(states[place] for states in again[i])] for first, i in both)
        between = min(largest([a], [b]) for a in earlier for b in later)
        within = max(largest([a], [b]) for group in (earlier, later) for a, b in combinations(group, 2))
        # Not the measured noise, as it was measured with the same kernels. Written so that a NaN stays a leak.
        is_rounding = relative_difference(now, before, typical=subject.chooses) <= FLOORS[dtype]
        if not (between <= within and is_rounding):
            moved = max(moved, between, 0.0 if is_rounding else largest([now], [before]))
        varied = max(varied, within)
    return moved, varied


class _Regrouping:
    """Search for changes that regrouping tokens does not explain, usually grouping by expert.

    Each layer gets the same input as in an earlier run of the document. Its token mixer, which comes before the
    experts, must give the same bits again. The layer's output may differ by rounding.
    """

    def __init__(self, probe: Probe, arrangement: Arrangement, noise: Differences) -> None:
        self.subject, self.probe, self.arrangement, self.noise = probe.subject, probe, arrangement, noise
        self.met: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor | None, Trace]] = {}

    @torch.no_grad()
    def measure(self, which: Sequence[bool]) -> float:
        """Return the change beyond rounding in this run, 0 if there is none."""
        documents = self.arrangement.documents
        numbered = list(zip(documents, which, strict=True))
        before = {i: self.met[i, replaced] for i, replaced in numbered if (i, replaced) in self.met}
        handed = {i: trace for i, (_, _, trace) in before.items()}
        tokens = self.probe.replaced(documents, which)
        run = run_packed(self.probe, self.arrangement, None, handed, tokens=tokens)
        for i, replaced in numbered:
            self.met.setdefault((i, replaced), (run.states[i], run.logits.get(i), run.traces[i]))
        if not before:
            return 0.0
        moved, typical = 0.0, self.subject.chooses
        found = differences({i: run.traces[i] for i in before}, handed, typical=typical)
        for i, (states, logits, trace) in before.items():
            after = run.traces[i]
            for key in trace:
                if key.kind == "left" and key in after and trace[key].shape == after[key].shape:
                    usual = float(trace[key].float().square().mean().sqrt()) or 1.0
                    moved = max(moved, largest([after[key]], [trace[key]]) / usual)
            found[STATES, i] = relative_difference(run.states[i], states, typical=typical)
            if logits is not None:
                found[LOGITS, i] = relative_logits(run.logits[i], logits, typical=typical)
        dtype = rounding_dtype(self.subject.model, run.dtype)
        beyond, _ = worst(found, self.noise, dtype)
        return max(moved, 0.0 if beyond.excess <= 1 else beyond.difference)


@torch.no_grad()
def measure_control(probe: Probe, *, told: Sequence[str] = ()) -> float:
    """Measure how far the logits of documents move when others are replaced and the call has no boundaries.

    They must move. The unit is the logits' standard deviation. `told` names the arguments that the call keeps;
    positions that restart are left out by default, as transformers reads boundaries from them.
    """
    which = replacements(len(probe.lengths))[1]
    before, after = (
        probe.packed(probe.row, probe.replaced(probe.row.documents, replaced), told=told).logits
        for replaced in ((False,) * len(which), which)
    )
    stay = [i for i, replaced in enumerate(which) if not replaced]
    scale = float(torch.cat([logits.float() for logits in before.values()]).std())
    return share(largest((after[i] for i in stay), (before[i] for i in stay)), scale)


@torch.no_grad()
def first_leak(probe: Probe, leak: Isolation) -> str | None:
    """Return the first module whose output for an unchanged document moves between the two runs of the leak."""
    tokens = (probe.replaced(leak.where.documents, replaced) for replaced in leak.which)
    before, after = (probe.outputs_in(leak.where, partial(probe.packed, leak.where, own)) for own in tokens)
    stay = [i for i, (one, other) in enumerate(zip(*leak.which, strict=True)) if one == other]
    moved = (
        name
        for name in before
        if name in after and largest((after[name][i] for i in stay), (before[name][i] for i in stay)) > 0
    )
    return next(moved, None)
