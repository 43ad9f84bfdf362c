"""Compare packed documents with the same documents alone: each layer forwards, each parameter backwards.

The limits come from rounding.

Shape letters: n tokens of a document, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias

import torch

from .compare import (
    Finding,
    differences,
    relative_difference,
    relative_gradients,
    relative_logits,
    worst,
    worst_inputs,
)
from .compare import worst_gradient as find_worst_gradient
from .documents import Documents
from .following import Following, Key, Trace
from .probe import Arrangement, Outputs, Probe
from .rounding import last_places_off
from .subject import Subject, rounding_dtype

Differences: TypeAlias = "dict[tuple[Key, int], float]"
STATES, LOGITS = Key("states", "the LM head's input", 0), Key("logits", "the LM head", 0)


class Followed(NamedTuple):
    """Results of a run for each document, by number: outputs, gradients of the embeddings and traces of the layers."""

    states: dict[int, torch.Tensor]
    logits: dict[int, torch.Tensor]
    inputs: dict[int, torch.Tensor]
    traces: dict[int, Trace]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits, or of the LM head's input if there are no logits."""
        return next(values.dtype for found in (self.logits, self.states) for values in found.values())


class Parity(NamedTuple):
    """Differences between the packed documents and the same documents alone.

    Attributes:
        alone ([`Followed`]): the documents alone.
        noise (`dict`): rounding of every layer and document.
        forward ([`Finding`]): the worst layer.
        first (`str` or `None`): the first module beyond its limit.
        gradients ([`Finding`] or `None`): the worst parameter, or the embeddings; `None` if nothing trains.
        where ([`Arrangement`]): the arrangement of the worst layer.
    """

    alone: Followed
    noise: Differences
    forward: Finding
    first: str | None
    gradients: Finding | None
    where: Arrangement


def measure_parity(
    subject: Subject, probe: Probe, trained: Sequence[Arrangement], others: Iterable[Arrangement] = ()
) -> Parity:
    """Measure the parity of the documents in some arrangements.

    Those in `trained` hold all documents, and the gradient of every parameter is compared. In the others only the
    gradients of the embeddings are compared.
    """
    others = list(others)
    return subject.finite(lambda: _measure(subject, probe, trained, others), lambda found: found.gradients)


def _measure(subject: Subject, probe: Probe, trained: Sequence[Arrangement], others: Sequence[Arrangement]) -> Parity:
    subject.begin(f"each of {len(probe.lengths)} documents alone", 0.4)
    subject.clear()
    # The documents' own gradients are added (sign 1), then the packed one is subtracted (-1), so that `.grad` holds
    # the difference.
    alone, norms = _run_alone(subject, probe, sign=1.0), subject.sizes()
    copied = subject.copied()
    dtype = rounding_dtype(subject.model, alone.dtype)
    by_packing, found = [0.0] * len(norms), []
    for number, arrangement in enumerate(trained):
        subject.begin("the same documents packed", 0.25 / len(trained))
        if number:  # start again: an adapter's gradients are copied, those of a large model are computed again
            subject.clear()
            _run_alone(subject, probe, sign=1.0) if copied is None else subject.put_back(copied)
        found.append(_apart(subject, run_packed(subject, probe, arrangement, alone.traces, sign=-1.0), alone))
        by_packing = list(map(max, by_packing, subject.norms()))
    subject.begin("what rounding alone changes", 0.15)
    # Rounding is measured packed, not alone: it needs two runs instead of one for each document, and is of equal size.
    subject.clear()
    with last_places_off(subject.model, by=0.0):
        as_it_is = run_packed(subject, probe, trained[-1], alone.traces, sign=-1.0)
    with last_places_off(subject.model):
        rounded = run_packed(subject, probe, trained[-1], alone.traces, sign=1.0)
    by_rounding, noise = subject.norms(), _apart(subject, rounded, as_it_is)
    subject.clear()
    subject.begin("documents in other arrangements", 0.2)
    for arrangement in others:
        run = run_packed(subject, probe, arrangement, alone.traces, sign=-1.0, frozen=True)
        found.append(_apart(subject, run, alone))
    # Each arrangement is judged by itself, as a document and layer may be wrong in only one of them.
    judged = [(*worst(apart.layers, noise.layers, dtype), where)
              for apart, where in zip(found, [*trained, *others], strict=True)]  # fmt: skip
    forward, first, where = max(judged, key=lambda item: item[0].excess)
    gradients = [worst_inputs(apart.inputs, noise.inputs, dtype) for apart in found if apart.inputs]
    if sum(norms):
        changed, rounding = (relative_gradients(by, norms) for by in (by_packing, by_rounding))
        gradients.append(find_worst_gradient(subject.dimensions, changed, rounding, dtype))
    gradient = max(gradients, key=lambda finding: finding.excess, default=None)
    return Parity(alone, noise.layers, forward, first, gradient, where)


def run_packed(
    subject: Subject,
    probe: Probe,
    arrangement: Arrangement,
    handed: dict[int, Trace],
    *,
    tokens: Documents | None = None,
    sign: float | None = None,
    frozen: bool = False,
) -> Followed:
    """Run documents packed, with the inputs in `handed` for their layers; with `sign` add their gradients.

    If `frozen`, only the embeddings get gradients.
    """
    following = Following(arrangement.places, arrangement.shape, [handed.get(i) for i in arrangement.documents])
    with subject.frozen() if frozen else nullcontext(), following.attached(subject.parts):
        outputs = _run(subject, probe, arrangement, lambda: probe.packed(arrangement, tokens), sign)
    return _followed(arrangement.documents, outputs, following)


def _run_alone(subject: Subject, probe: Probe, *, sign: float) -> Followed:
    """Run every document by itself and add its gradients."""
    found = Followed({}, {}, {}, {})
    for document, length in enumerate(probe.lengths):
        arrangement = Arrangement.of_rows(probe.lengths, ((document,),), torch.device("cpu"))
        following = Following([torch.arange(length)], (1, length))
        with following.attached(subject.parts):
            outputs = _run(subject, probe, arrangement, lambda: probe.alone(document), sign)  # noqa: B023  # runs now
        subject.note_gain()
        own = _followed((document,), outputs, following)
        found.states.update(own.states)
        found.logits.update(own.logits)
        found.inputs.update(own.inputs)
        found.traces.update(own.traces)
    return found


def _run(
    subject: Subject, probe: Probe, arrangement: Arrangement, call: Callable[[], Outputs], sign: float | None
) -> Outputs:
    # No graph is built if no gradients are taken: PEFT's activated LoRA allows one forward for each backward.
    gradients = torch.set_grad_enabled(sign is not None)
    with gradients, nullcontext([]) if subject.whole or sign is None else probe.embedded() as embedded:
        outputs = call()
        if sign is not None and subject.trained:
            documents = arrangement.documents
            probe.backward(outputs, documents, documents, scale=sign * subject.loss_scale, head=subject.whole)
    found = arrangement.gradients(embedded)
    return outputs._replace(inputs=None if found is None or sign is None else [sign * gradient for gradient in found])


def _followed(documents: Sequence[int], outputs: Outputs, following: Following) -> Followed:
    inputs = outputs.inputs or []
    states, logits = ([tensor.detach() for tensor in tensors] for tensors in (outputs.states, outputs.logits))
    scored = {i: values for i, values in zip(documents, logits, strict=True) if len(values)}
    return Followed(
        dict(zip(documents, states, strict=True)),
        scored,
        dict(zip(documents, inputs, strict=False)),
        dict(zip(documents, following.traces, strict=True)),
    )


class _Apart(NamedTuple):
    """Relative differences between two runs: of all traced tensors, and of each document's embeddings' gradients."""

    layers: Differences
    inputs: dict[int, float]


def _apart(subject: Subject, run: Followed, expected: Followed) -> _Apart:
    typical = subject.chooses
    found = differences(run.traces, expected.traces, typical=typical)
    for document, states in run.states.items():
        found[STATES, document] = relative_difference(states, expected.states[document], typical=typical)
    for document, logits in run.logits.items():
        if document in expected.logits:
            found[LOGITS, document] = relative_logits(logits, expected.logits[document], typical=typical)
    inputs = {
        i: relative_difference(gradient, expected.inputs[i], typical=typical)
        for i, gradient in run.inputs.items()
        if i in expected.inputs
    }
    return _Apart(found, inputs)


@torch.no_grad()
def first_difference(probe: Probe, arrangement: Arrangement, allowed: float) -> str | None:
    """Return the name of the first module whose packed output for a document differs from that of the document
    alone."""
    # No inputs are replaced here, so differences grow from layer to layer, and the first shows where they begin.
    packed = probe.outputs_packed(arrangement)
    alone = [probe.outputs_alone(i) for i in arrangement.documents]
    for name, outputs in packed.items():
        own = [document[name] for document in alone if name in document]
        same = len(own) == len(outputs) and all(a.shape == b.shape for a, b in zip(own, outputs, strict=True))
        if same and any(not relative_difference(a, b) <= allowed for a, b in zip(outputs, own, strict=True)):
            return name
    return None
