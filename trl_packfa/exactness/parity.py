"""Compare packed documents with the same documents alone.

Shape letters: n tokens of a document, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from .compare import relative_difference
from .documents import Documents
from .engine import Compared, compare
from .following import Following, Run
from .probe import Arrangement, Probe, traced


def measure_parity(
    probe: Probe, trained: Sequence[Arrangement], others: Iterable[Arrangement] = (), *, gradients: bool = True
) -> Compared:
    """Compare the documents in some arrangements with the documents alone.

    Those in `trained` hold all documents, and the gradient of every parameter is compared. In the others only the
    gradients of the embeddings are compared. `Compared.where` counts both, in this order. Without `gradients`
    all run under `torch.no_grad()`.
    """
    return compare(
        probe.subject,
        partial(_run_alone, probe),
        [partial(run_packed, probe, arrangement) for arrangement in trained],
        # Packed, not alone: that needs two runs instead of one for each document, and rounding is of equal size.
        rounding=partial(run_packed, probe, trained[-1]),
        others=[partial(run_packed, probe, arrangement, frozen=True) for arrangement in others],
        gradients=gradients,
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
    handed: Run,
    *,
    tokens: Documents | None = None,
    frozen: bool = False,
    free: bool = False,
) -> Run:
    """Run documents packed, with the inputs in `handed` for their layers; with `sign` add their gradients.

    If `frozen`, only the embeddings get gradients. If `free`, routers choose by themselves.
    """
    following = Following(arrangement.places, arrangement.shape, handed, free=free)
    with probe.subject.frozen() if frozen else nullcontext():
        return _run(probe, arrangement, lambda: probe.packed(arrangement, tokens), sign, following)


def _run_alone(probe: Probe, sign: float | None, handed: Run) -> Run:
    """Run every document by itself and add its gradients; the layers get their own inputs."""
    found: Run = {}
    for document in range(len(probe.lengths)):
        own = probe.arranged(((document,),))
        following = Following(own.places, own.shape, {})
        found |= _run(probe, own, partial(probe.alone, document), sign, following)
        probe.subject.note_gain()
    return found


def _run(
    probe: Probe, arrangement: Arrangement, call: Callable[[], Run], sign: float | None, following: Following
) -> Run:
    subject = probe.subject
    with nullcontext([]) if subject.whole or sign is None else probe.embedded() as embedded:
        run = traced(subject, call, following, sign, partial(probe.losses, head=subject.whole))
    return arrangement.with_gradients(run, embedded, sign or 1.0)


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
