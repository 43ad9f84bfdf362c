"""Compare other ways to run the same documents with a reference: every layer forwards, every parameter backwards.

[`compare`] serves packed rows against documents alone (`measure.py`), and rows without pads against padded rows and
shared prefixes against separate rows (`unpadding.py`). The limits come from rounding.

Each layer gets the inputs that it had in the reference, so that a difference shows in the layer that makes it. The
reference adds its gradients (sign 1), a candidate subtracts its own (-1): the difference remains in `.grad`, without a
second copy of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from ..comparison import TOLERANCES, Comparison, nearest
from .compare import (
    Differences,
    judged,
    judged_layers,
    relative_difference,
    relative_gradients,
    relative_logits,
    routed_difference,
)
from .rounding import last_places_off
from .runs import Key, Run, dtype_of
from .subject import Subject, rounding_dtype

# A gradient may differ by this many times the measured rounding: a bias has only few numbers, so its rounding varies
# more than that of a layer's output.
_GRADIENT_NOISE_FACTOR = 6.0
# A difference of up to three times its limit is judged again, after rounding was drawn three times more.
_NEAR, _MORE_DRAWS = 3.0, 3
# Share of the reference's own rounding that counts: a gradient may be off by twice as much (six times a third). The
# false alarms that it is for were off by 0.7 and 1.7 times this rounding, half a gradient in bfloat16 by 4.3 times.
_REFERENCE_SHARE = 1 / 3
_STATES, _LOGITS = Key("states", "the LM head's input", 0), Key("logits", "the LM head", 0)
# Runs all documents. It gets the sign with which their gradients are added, `None` for no gradients, and the run whose
# inputs the layers get.
Way: TypeAlias = "Callable[[float | None, Run], Run]"


class Compared(NamedTuple):
    """Differences between the candidates and the reference."""

    reference: Run
    noise: Differences  # rounding of every layer and document
    forward: Comparison  # the worst layer or output
    first: str | None  # the first module beyond its limit
    gradients: Comparison | None  # the worst parameter, or the embeddings; `None` if nothing trains
    where: int  # index of the candidate with the worst layer

    @property
    def excess(self) -> float:
        """The worst difference as a share of its limit."""
        return max(self.forward.excess, 0.0 if self.gradients is None else self.gradients.excess)

    def rows(self, kind: str, of: str = "") -> list[Comparison]:
        """Return the comparisons of a report: of this kind, and of its gradients."""
        rows = [self.forward._replace(kind=kind, where=self.first or self.forward.where, of=of)]
        return rows if self.gradients is None else [*rows, self.gradients._replace(kind=f"{kind} gradients", of=of)]


def compare(
    subject: Subject,
    reference: Way,
    candidates: Sequence[Way],
    *,
    rounding: Way | None = None,
    others: Sequence[Way] = (),
    gradients: bool = True,
) -> Compared:
    """Compare ways to run the documents with a reference; again with smaller losses while gradients overflow.

    The reference is right by definition. Candidates run all documents, and the gradient of every parameter is
    compared; `others` run some documents, in which parameters get no gradients. Without `gradients` nothing gets any
    and no graph is built. Rounding is measured in a way of its own (by default the reference): run as it is, and with
    every value off by up to a last place.

    An example, a small SmolLM3 in float32: the worst layer of a packed document is 4.0e-7 from the same document
    alone. Allowed are four times what rounding changes there, at least 1e-4.
    """
    rounding, plus, minus = rounding or reference, *((1.0, -1.0) if gradients else (None, None))
    subject.begin("each document alone", 0.4)
    subject.clear()
    expected, norms = reference(plus, {}), subject.sizes()
    copied = subject.copied()
    found = []
    for number, way in enumerate(candidates):
        subject.begin("the same documents packed", 0.25 / len(candidates))
        if number:  # start again: an adapter's gradients are copied, those of a large model are computed again
            subject.clear()
            reference(plus, {}) if copied is None else subject.put_back(copied)
        found.append(_differences(subject, way(minus, expected), expected))
    subject.begin("what rounding alone changes", 0.15)
    noise = _rounding(subject, rounding, expected, gradients)
    subject.clear()
    subject.begin("documents in other arrangements", 0.2)
    found += [_differences(subject, way(minus, expected), expected) for way in others]
    comparison = _judged(subject, expected, norms, found, noise)
    # One draw of random last places may show less rounding than there is, and the reference may round more than the
    # way in which rounding is measured: attention of documents alone runs in another kernel. So before the model is
    # blamed for a difference near its limit, rounding is drawn again, and in the reference, too.
    if subject.anywhere(1 < comparison.excess <= _NEAR):
        for _ in range(_MORE_DRAWS):
            noise = noise.or_larger(_rounding(subject, rounding, expected, gradients))
        noise = noise.or_larger(_rounding(subject, reference, expected, gradients), _REFERENCE_SHARE)
        subject.clear()
        comparison = _judged(subject, expected, norms, found, noise)
    overflows = comparison.gradients is not None and not math.isfinite(comparison.gradients.difference)
    if subject.anywhere(overflows) and subject.scale_down():
        del expected, copied, comparison  # this try's traces and gradients, before the next one takes memory
        return compare(subject, reference, candidates, rounding=rounding, others=others, gradients=gradients)
    return comparison


class _Differences(NamedTuple):
    """Differences between two runs, and between the gradients of their parameters."""

    layers: Differences  # relative, of all traced tensors
    inputs: dict[int, float]  # relative, of the gradients of each document's embeddings
    gradients: list[float]  # norms, one for each parameter

    def or_larger(self, other: _Differences, share: float = 1.0) -> _Differences:
        """Return the larger value of both everywhere; values of the other are first multiplied by `share`."""
        return _Differences(
            {key: max(value, other.layers[key] * share) for key, value in self.layers.items()},
            {key: max(value, other.inputs[key] * share) for key, value in self.inputs.items()},
            [max(own, value * share) for own, value in zip(self.gradients, other.gradients, strict=True)],
        )


def layer_differences(run: Run, expected: Run, *, typical: bool) -> Differences:
    """Return the [`relative_difference`] of everything that both runs have traced, and of the head's input and logits.

    The last two stand behind all layers.
    """
    layers: Differences = {}
    states: Differences = {}
    logits: Differences = {}
    for i, own in run.items():
        other = expected[i]
        for key, value in own.trace.items():
            same = key in other.trace and other.trace[key].shape == value.shape
            if same and torch.equal(value, other.trace[key]):
                layers[key, i] = 0.0
            elif same and key.kind == "routed":
                layers[key, i] = routed_difference(value, other.trace[key], typical=typical)
            elif same and value.is_floating_point():
                layers[key, i] = relative_difference(value, other.trace[key], typical=typical)
        states[_STATES, i] = relative_difference(own.states, other.states, typical=typical)
        if own.logits is not None and other.logits is not None:
            # The softmax of a single logit has no mean to ignore.
            relative = relative_logits if own.logits.shape[-1] > 1 else relative_difference
            logits[_LOGITS, i] = relative(own.logits, other.logits, typical=typical)
    return layers | states | logits


def _differences(subject: Subject, run: Run, expected: Run) -> _Differences:
    inputs = {
        i: relative_difference(own.gradient, other, typical=subject.chooses)
        for i, own in run.items()
        if own.gradient is not None and (other := expected[i].gradient) is not None
    }
    return _Differences(layer_differences(run, expected, typical=subject.chooses), inputs, subject.norms())


def _rounding(subject: Subject, rounding: Way, expected: Run, gradients: bool) -> _Differences:
    """Run twice in the way that is right, once with every value off by up to a last place."""
    subject.clear()
    with last_places_off(subject.model, by=0.0):
        as_it_is = rounding(-1.0 if gradients else None, expected)
    with last_places_off(subject.model):
        rounded = rounding(1.0 if gradients else None, expected)
    return _differences(subject, rounded, as_it_is)


def _judged(
    subject: Subject, expected: Run, norms: list[float], found: list[_Differences], noise: _Differences
) -> Compared:
    """Compare the differences of all ways with what rounding changes; `norms` are of the reference's gradients."""
    dtype = rounding_dtype(subject.model, dtype_of(expected))
    # Each way is judged by itself, as a document and layer may be wrong in only one of them.
    by_way = [judged_layers(difference.layers, noise.layers, dtype) for difference in found]
    where = max(range(len(by_way)), key=lambda way: nearest(by_way[way]).excess)
    first = next((layer.where for layer in by_way[where] if not layer.holds), None)
    table, gradients = TOLERANCES[dtype], partial(judged, "gradients", factor=_GRADIENT_NOISE_FACTOR)
    changed: list[Comparison] = []
    for difference in found:
        changed += gradients(difference.inputs, noise.inputs, lambda _: table.gradients, lambda _: "the embeddings")
    if sum(norms):
        largest = [max(0.0, *of_ways) for of_ways in zip(*(difference.gradients for difference in found), strict=True)]
        names = subject.dimensions
        differ, rounded = (relative_gradients(names, by, norms) for by in (largest, noise.gradients))
        changed += gradients(differ, rounded, lambda name: table.vectors if names[name] < 2 else table.gradients, str)
    return Compared(
        expected, noise.layers, nearest(by_way[where]), first, nearest(changed) if changed else None, where
    )
