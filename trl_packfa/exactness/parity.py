"""Compare packed documents with the same documents alone.

Shape letters: n tokens of a document, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from .compare import relative_difference
from .documents import Documents
from .engine import Comparison, compare
from .following import Following, Trace
from .probe import Arrangement, Probe, Run


def measure_parity(probe: Probe, trained: Sequence[Arrangement], others: Iterable[Arrangement] = ()) -> Comparison:
    """Compare the documents in some arrangements with the documents alone.

    Those in `trained` hold all documents, and the gradient of every parameter is compared. In the others only the
    gradients of the embeddings are compared. `Comparison.where` counts both, in this order.
    """
    return compare(
        probe.subject,
        partial(_run_alone, probe),
        [partial(run_packed, probe, arrangement) for arrangement in trained],
        # Packed, not alone: that needs two runs instead of one for each document, and rounding is of equal size.
        rounding=partial(run_packed, probe, trained[-1]),
        others=[partial(run_packed, probe, arrangement, frozen=True) for arrangement in others],
        names=(
            f"each of {len(probe.lengths)} documents alone",
            "the same documents packed",
            "documents in other arrangements",
        ),
    )


def run_packed(
    probe: Probe,
    arrangement: Arrangement,
    sign: float | None,
    handed: Mapping[int, Trace],
    *,
    tokens: Documents | None = None,
    frozen: bool = False,
) -> Run:
    """Run documents packed, with the inputs in `handed` for their layers; with `sign` add their gradients.

    If `frozen`, only the embeddings get gradients.
    """
    with probe.subject.frozen() if frozen else nullcontext():
        return _run(probe, arrangement, lambda: probe.packed(arrangement, tokens), sign, handed)


def _run_alone(probe: Probe, sign: float | None, handed: Mapping[int, Trace]) -> Run:
    """Run every document by itself and add its gradients; the layers get their own inputs."""
    found = Run({}, {}, {}, {})
    for document in range(len(probe.lengths)):
        found.add(_run(probe, probe.arranged(((document,),)), partial(probe.alone, document), sign, {}))
        probe.subject.note_gain()
    return found


def _run(
    probe: Probe, arrangement: Arrangement, call: Callable[[], Run], sign: float | None, handed: Mapping[int, Trace]
) -> Run:
    subject, documents = probe.subject, arrangement.documents
    following = Following(arrangement.places, arrangement.shape, [handed.get(i) for i in documents])
    leaves = nullcontext([]) if subject.whole or sign is None else probe.embedded()
    # No graph is built if no gradients are taken: PEFT's activated LoRA allows one forward for each backward.
    with torch.set_grad_enabled(sign is not None), following.attached(subject.parts), leaves as embedded:
        run = call()
        if sign is not None and subject.trained:
            probe.backward(run, documents, scale=sign * subject.loss_scale, head=subject.whole)
    found = arrangement.gradients(embedded)
    inputs = {} if sign is None or found is None else {i: sign * own for i, own in zip(documents, found, strict=True)}
    states, logits = ({i: tensor.detach() for i, tensor in own.items()} for own in (run.states, run.logits))
    return Run(states, logits, inputs, dict(zip(documents, following.traces, strict=True)))


@torch.no_grad()
def first_difference(probe: Probe, arrangement: Arrangement, allowed: float) -> str | None:
    """Return the first module whose packed output for a document differs from that of the document alone."""
    # No inputs are replaced here, so differences grow from layer to layer, and the first shows where they begin.
    packed = probe.outputs_in(arrangement, partial(probe.packed, arrangement))
    alone = [probe.outputs_in(probe.arranged(((i,),)), partial(probe.alone, i)) for i in arrangement.documents]
    for name, outputs in packed.items():
        own = [document[name][0] for document in alone if name in document]
        same = len(own) == len(outputs) and all(a.shape == b.shape for a, b in zip(own, outputs, strict=True))
        if same and any(not relative_difference(a, b) <= allowed for a, b in zip(outputs, own, strict=True)):
            return name
    return None
