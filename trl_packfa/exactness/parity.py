"""Compare packed documents with the same documents alone.

Shape letters: n tokens of a document, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from .compare import relative_difference
from .documents import Documents
from .engine import Comparison, Run, Way, compare
from .following import Following, Trace
from .probe import Arrangement, Outputs, Probe
from .subject import Subject


def measure_parity(
    subject: Subject, probe: Probe, trained: Sequence[Arrangement], others: Iterable[Arrangement] = ()
) -> Comparison:
    """Compare the documents in some arrangements with the documents alone.

    Those in `trained` hold all documents, and the gradient of every parameter is compared. In the others only the
    gradients of the embeddings are compared. `Comparison.where` counts both, in this order.
    """

    def packed(arrangement: Arrangement, *, frozen: bool = False) -> Way:
        return lambda sign, handed: run_packed(subject, probe, arrangement, handed, sign=sign, frozen=frozen)

    return compare(
        subject,
        lambda sign, handed: _run_alone(subject, probe, sign=sign),
        [packed(arrangement) for arrangement in trained],
        # Packed, not alone: that needs two runs instead of one for each document, and rounding is of equal size.
        rounding=packed(trained[-1]),
        others=[packed(arrangement, frozen=True) for arrangement in others],
        names=(
            f"each of {len(probe.lengths)} documents alone",
            "the same documents packed",
            "documents in other arrangements",
        ),
    )


def run_packed(
    subject: Subject,
    probe: Probe,
    arrangement: Arrangement,
    handed: Mapping[int, Trace],
    *,
    tokens: Documents | None = None,
    sign: float | None = None,
    frozen: bool = False,
) -> Run:
    """Run documents packed, with the inputs in `handed` for their layers; with `sign` add their gradients.

    If `frozen`, only the embeddings get gradients.
    """
    following = Following(arrangement.places, arrangement.shape, [handed.get(i) for i in arrangement.documents])
    with subject.frozen() if frozen else nullcontext(), following.attached(subject.parts):
        outputs = _run(subject, probe, arrangement, lambda: probe.packed(arrangement, tokens), sign)
    return _results(arrangement.documents, outputs, following)


def _run_alone(subject: Subject, probe: Probe, *, sign: float | None) -> Run:
    """Run every document by itself and add its gradients."""
    found = Run({}, {}, {}, {})
    for document, length in enumerate(probe.lengths):
        arrangement = Arrangement.of_rows(probe.lengths, ((document,),), torch.device("cpu"))
        following = Following([torch.arange(length)], (1, length))
        with following.attached(subject.parts):
            outputs = _run(subject, probe, arrangement, lambda: probe.alone(document), sign)  # noqa: B023  # runs now
        subject.note_gain()
        found.add(_results((document,), outputs, following))
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


def _results(documents: Sequence[int], outputs: Outputs, following: Following) -> Run:
    inputs = outputs.inputs or []
    states, logits = ([tensor.detach() for tensor in tensors] for tensors in (outputs.states, outputs.logits))
    scored = {i: values for i, values in zip(documents, logits, strict=True) if len(values)}
    return Run(
        dict(zip(documents, states, strict=True)),
        scored,
        dict(zip(documents, inputs, strict=False)),
        dict(zip(documents, following.traces, strict=True)),
    )


@torch.no_grad()
def first_difference(probe: Probe, arrangement: Arrangement, allowed: float) -> str | None:
    """Return the first module whose packed output for a document differs from that of the document alone."""
    # No inputs are replaced here, so differences grow from layer to layer, and the first shows where they begin.
    packed = probe.outputs_packed(arrangement)
    alone = [probe.outputs_alone(i) for i in arrangement.documents]
    for name, outputs in packed.items():
        own = [document[name] for document in alone if name in document]
        same = len(own) == len(outputs) and all(a.shape == b.shape for a, b in zip(own, outputs, strict=True))
        if same and any(not relative_difference(a, b) <= allowed for a, b in zip(outputs, own, strict=True)):
            return name
    return None
