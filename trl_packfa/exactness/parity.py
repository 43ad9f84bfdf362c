"""Is a document packed what it is alone? Layer by layer forwards, parameter by parameter backwards, against rounding.

Shape letters: n tokens of a document, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias

import torch

from .compare import Finding, differences, relative_difference, relative_gradients, relative_logits, worst
from .compare import worst_gradient as find_worst_gradient
from .documents import SHORT, Documents
from .following import Following, Key, Trace
from .probe import Arrangement, Probe
from .rounding import last_places_off
from .subject import Subject, rounding_dtype

Differences: TypeAlias = "dict[tuple[Key, int], float]"
_LOGITS = Key("logits", "the LM head", 0)


class Alone(NamedTuple):
    """Logits `(n, V)` of each document alone, and what went through its layers."""

    logits: Documents
    traces: list[Trace]


class Parity(NamedTuple):
    """How far the packed documents are from the same documents alone.

    Attributes:
        alone ([`Alone`]): the documents alone.
        noise (`dict`): what rounding makes of every layer and document.
        forward ([`Finding`]): the worst layer.
        first (`str` or `None`): the first module beyond what is allowed.
        gradients ([`Finding`] or `None`): the worst parameter; `None` if nothing trains.
        gradient_noise (`list[float]`): what rounding makes of every parameter's gradient, relative.
    """

    alone: Alone
    noise: Differences
    forward: Finding
    first: str | None
    gradients: Finding | None
    gradient_noise: list[float]


def measure_short(subject: Subject, probe: Probe) -> Parity:
    """Parity of one row, the noise of forwards and gradients measured on the same documents."""
    return subject.finite(lambda: _measure_short(subject, probe), lambda found: found.gradients)


def _measure_short(subject: Subject, probe: Probe) -> Parity:
    subject.begin("each short document alone", 0.06)
    subject.clear()
    # The documents' own gradients are added (sign 1), then the packed one is taken away (-1): what is left in `.grad`
    # is the difference, with no second copy of all gradients in memory.
    alone, norms = _run_alone(subject, probe, sign=1.0), subject.sizes()
    # The same gradients are needed again for the noise. An adapter's are copied, those of a whole model made anew.
    copied = subject.copied()
    subject.begin("the same documents packed", 0.03)
    dtype = rounding_dtype(subject.model, alone.logits[0].dtype)
    logits, followed = run_packed(subject, probe, probe.row, probe.packed, alone.traces, sign=-1.0)
    by_packing = subject.norms()
    found = _compared(subject, logits, followed.traces, alone)
    subject.begin("what rounding alone changes", 0.06)
    subject.clear()
    if copied is None:
        _run_alone(subject, probe, sign=1.0)
    else:
        subject.put_back(copied)
    # Handed only what the packed run could be handed, so that both are measured alike.
    rounded = _run_alone(subject, probe, handed=alone.traces, held=followed.held, sign=-1.0, off=True)
    by_rounding = subject.norms()
    noise = _compared(subject, rounded.logits, rounded.traces, alone)
    forward, first = worst(found, noise, dtype)
    trains = bool(sum(norms))
    gradient_noise = relative_gradients(by_rounding, norms) if trains else []
    gradients = None
    if trains:
        by_packing = relative_gradients(by_packing, norms)
        gradients = find_worst_gradient(subject.dimensions, by_packing, gradient_noise, dtype)
    return Parity(alone, noise, forward, first, gradients, gradient_noise)


def measure_long(subject: Subject, probe: Probe, short: Parity) -> Parity:
    """Parity of one row and, with gradients, of several rows, of documents among which are the short ones.

    What is known of these is not measured again: they are packed with the others, without a loss.
    """
    return subject.finite(lambda: _measure_long(subject, probe, short), lambda found: found.gradients)


def _measure_long(subject: Subject, probe: Probe, short: Parity) -> Parity:
    subject.begin("each long document alone", 0.2)
    subject.clear()
    rest = [document for document in range(len(probe.lengths)) if document not in SHORT]
    others, norms = _run_alone(subject, probe, rest, sign=1.0), subject.sizes()
    # Of 4 documents with SHORT (0, 2), rest is [1, 3]: the logits lie in the order 0, 2, 1, 3, the places are [0, 2,
    # 1, 3].
    places = [(*SHORT, *rest).index(document) for document in range(len(probe.lengths))]
    logits, traces = [*short.alone.logits, *others.logits], [*short.alone.traces, *others.traces]
    alone = Alone([logits[place] for place in places], [traces[place] for place in places])
    dtype = rounding_dtype(subject.model, alone.logits[0].dtype)
    subject.begin("the same documents packed in several rows", 0.13)
    # A loss of the rest only: `norms` are of their gradients, which the short documents' would be added to.
    logits, in_rows = run_packed(subject, probe, probe.rows, probe.in_rows, alone.traces, losses=rest, sign=-1.0)
    by_packing = subject.norms()
    subject.clear()
    found = _compared(subject, logits, in_rows.traces, alone)
    subject.begin("the same documents packed in one row", 0.05)
    logits, in_row = run_packed(subject, probe, probe.row, probe.packed, alone.traces)
    for key, difference in _compared(subject, logits, in_row.traces, alone).items():
        found[key] = max(difference, found.get(key, 0.0))
    subject.begin("what rounding alone changes of long documents", 0.1)
    # Packed, not alone: one run instead of twelve, and what is off by a last place is off by as much.
    logits, as_it_is = run_packed(subject, probe, probe.rows, probe.in_rows, alone.traces, losses=rest, sign=1.0)
    with last_places_off(subject.model):
        rounded, off = run_packed(subject, probe, probe.rows, probe.in_rows, alone.traces, losses=rest, sign=-1.0)
    by_rounding = subject.norms()
    noise = _compared(subject, rounded, off.traces, Alone(logits, as_it_is.traces))
    forward, first = worst(found, noise, dtype)
    gradients, gradient_noise = None, short.gradient_noise
    if sum(norms):
        by_packing, by_rounding = (relative_gradients(off_by, norms) for off_by in (by_packing, by_rounding))
        # Each parameter's larger one: long documents round otherwise than short ones.
        gradient_noise = list(map(max, gradient_noise, by_rounding))
        gradients = find_worst_gradient(subject.dimensions, by_packing, gradient_noise, dtype)
    return Parity(alone, noise, forward, first, gradients, gradient_noise)


def run_packed(
    subject: Subject,
    probe: Probe,
    arrangement: Arrangement,
    run: Callable[[Documents], Documents],
    handed: Sequence[Trace | None] | None,
    *,
    tokens: Documents | None = None,
    losses: Sequence[int] | None = None,
    sign: float | None = None,
) -> tuple[Documents, Following]:
    """Logits of the packed documents, their layers handed what is given; with `sign`, their gradients are added: of
    all documents, or of those that have a loss."""
    following = Following(arrangement.places, arrangement.shape, handed)
    with torch.set_grad_enabled(sign is not None), following.attached(subject.parts) as followed:
        logits = run(probe.tokens if tokens is None else tokens)
        with_loss = range(len(logits)) if losses is None else losses
        _backward(subject, probe, [logits[document] for document in with_loss], with_loss, sign)
    return [document.detach() for document in logits], followed


def _run_alone(
    subject: Subject,
    probe: Probe,
    documents: Sequence[int] | None = None,
    *,
    handed: Sequence[Trace] | None = None,
    held: set[Key] | None = None,
    sign: float | None = None,
    off: bool = False,
) -> Alone:
    """Every document, or these, by itself; its layers handed what the packed ones were, `off` by a last place."""
    logits, traces = [], []
    for document in range(len(probe.lengths)) if documents is None else documents:
        length = probe.lengths[document]
        given = None
        if handed is not None:
            given = [{key: value for key, value in handed[document].items() if key in (held or ())}]
        following = Following([torch.arange(length)], (1, length), given)
        # Without gradients where none are taken: PEFT's activated LoRA allows one forward for each backward.
        gradients = torch.set_grad_enabled(sign is not None)
        with gradients, following.attached(subject.parts), last_places_off(subject.model) if off else nullcontext():
            found = probe.alone(document)
            _backward(subject, probe, [found], [document], sign)
        if sign is not None and not off:
            subject.note_gain()
        logits.append(found.detach())
        traces.append(following.traces[0])
    return Alone(logits, traces)


def _backward(subject: Subject, probe: Probe, logits: Documents, documents: Sequence[int], sign: float | None) -> None:
    if sign is not None and subject.trained and any(document.requires_grad for document in logits):
        probe.backward(logits, documents, scale=sign * subject.loss_scale)


def _compared(subject: Subject, logits: Documents, traces: Sequence[Trace], alone: Alone) -> Differences:
    """The differences of everything followed, and of the logits."""
    found = differences(traces, alone.traces, typical=subject.chooses)
    for document, (one, other) in enumerate(zip(logits, alone.logits, strict=True)):
        found[_LOGITS, document] = relative_logits(one, other, typical=subject.chooses)
    return found


@torch.no_grad()
def first_difference(probe: Probe, allowed: float) -> str | None:
    """Name of the first module whose packed output for a document is not that of the document alone."""
    # Nothing is handed over here, so differences grow from layer to layer, and the first is where they begin.
    packed = probe.outputs_packed(probe.tokens)
    alone = [probe.outputs_alone(i) for i in range(len(probe.lengths))]
    for name, outputs in packed.items():
        own = [document[name] for document in alone if name in document]
        same = len(own) == len(outputs) and all(a.shape == b.shape for a, b in zip(own, outputs, strict=True))
        if same and any(not relative_difference(a, b) <= allowed for a, b in zip(outputs, own, strict=True)):
            return name
    return None
