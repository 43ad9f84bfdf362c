"""The proof of `unpad=True`: padded batches with and without their pads, forwards and backwards, on the model at hand.

The same batch runs twice through the patched model: with its pads, as it would without a patch, and without them. Each
layer is handed the same input, as in the proof of packing, and what remains is held against what rounding makes. Rows
are padded on the right and on the left. Where a model's padded rows are not their documents alone (recurrent state
that runs through pads, frequencies of the longest row), the rows without pads must be: they are compared with each
document by itself, and the report says so.

Shape letters: B rows, L row length, T true tokens, n tokens of a document, V vocabulary or labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnsupportedModel
from ..patching.apply import PatchState, find_state
from ..patching.inspect import find_backbone, forward_takes, inner_model, known_ids, max_positions
from ..runtime.compile import uncompiled
from ..runtime.padded_rows import PaddedRows, rows_of_lengths
from ..runtime.zero3 import gradients_taken
from .compare import Finding, differences, relative_difference, relative_gradients, relative_logits, worst
from .compare import worst_gradient as find_worst_gradient
from .documents import Documents, draw_documents, known_tokens
from .following import Following, Key, Trace
from .probe import device_of
from .quiet import quiet
from .rounding import last_places_off
from .subject import Subject, compute_dtype, rounding_dtype
from .unpadding_report import UnpaddingReport

# Rows in tokens: unequal, one of them one token, pads of a few columns even in the longest.
_LENGTHS = (11, 1, 37, 24)
_EXTRA = 3
_OUTPUT = Key("logits", "the output", 0)


class _Run(NamedTuple):
    """Outputs `(n, V)` of each document, and what went through the layers."""

    outputs: Documents
    traces: list[Trace]


def check_unpadding(
    model: nn.Module,
    *,
    documents: Sequence[Sequence[int]] | None = None,
    processing_class: Any = None,
    seed: int = 0,
) -> UnpaddingReport:
    """Measure whether padded batches without their pads are what they are with them, on this model as it is now.

    It runs some thousand tokens forwards and backwards; modes, gradients and random state are left as they were.

    Args:
        model (`torch.nn.Module`):
            Patched with `unpad=True`: a causal LM, a sequence or token classifier, a backbone; bare or wrapped.
        documents (`Sequence[Sequence[int]]`, *optional*):
            Token ids that the model knows; random ones without.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer, where there are no documents.
        seed (`int`, *optional*, defaults to `0`):
            Of what is drawn.

    Raises:
        [`UnsupportedModel`]: if the model is not patched with `unpad=True`, or hands its backbone no mask.
    """
    state = find_state(model)
    if state is None or state.unpadding is None:
        raise UnsupportedModel(
            "the model is not patched to run without pads.", do="Call trl_packfa.patch(model, unpad=True) first."
        )
    if isinstance(model, DistributedDataParallel):
        model = model.module
    started = time.perf_counter()
    # Its counters tell the user what training saved; the check's own calls must not count, nor leave it switched.
    counted = vars(state.unpadding).copy()
    known = known_tokens(documents, processing_class, known_ids(inner_model(model)))
    try:
        with gradients_taken(model) as parts, torch.enable_grad(), quiet(model, training=True), uncompiled(model):
            report = _measure(_Comparison(Subject(model, state, parts, None), state, known, seed))
    finally:
        vars(state.unpadding).update(counted)
    return UnpaddingReport(**report, seconds=round(time.perf_counter() - started, 3))


class _Comparison:
    """A few padded rows and the ways to run them."""

    def __init__(self, subject: Subject, state: PatchState, known: torch.Tensor, seed: int) -> None:
        self.subject, self.model, self.seed = subject, subject.model, seed
        assert state.unpadding is not None
        self.unpadding, self.device = state.unpadding, device_of(subject.model)
        inner = inner_model(self.model)
        most = max_positions(find_backbone(self.model, state.patch))
        lengths = [min(length, most or length) for length in _LENGTHS]
        self.tokens, _ = draw_documents(lengths, known, known_ids(inner), seed)
        pad = getattr(inner.config.get_text_config(), "pad_token_id", None)
        if pad is None and type(inner).__name__.endswith("ForSequenceClassification"):
            raise UnsupportedModel(
                f"{type(inner).__name__} has no pad_token_id: it finds the last token of a padded row by it.",
                do="Set model.config.pad_token_id to the tokenizer's.",
            )
        self.pad = 0 if pad is None else int(pad)
        width = max(lengths) + _EXTRA
        self.width = width if most is None else min(width, most)
        self.positions = forward_takes(inner, "position_ids")

    def rows(self, *, left: bool) -> PaddedRows:
        return rows_of_lengths([len(ids) for ids in self.tokens], self.width, left=left)

    def batch(self, rows: PaddedRows, *, masked: bool = True) -> dict[str, Any]:
        """The padded batch, as a collator makes it."""
        ids = torch.full(rows.shape, self.pad)
        mask = torch.zeros(rows.shape, dtype=torch.long)
        for i, (start, tokens) in enumerate(zip(rows.starts, self.tokens, strict=True)):
            ids[i, start : start + len(tokens)] = tokens
            mask[i, start : start + len(tokens)] = 1
        return {"input_ids": ids.to(self.device), "attention_mask": (mask if masked else mask * 0 + 1).to(self.device)}

    def run(
        self,
        call: dict[str, Any],
        rows: PaddedRows,
        *,
        unpad: bool,
        handed: Sequence[Trace] | None = None,
        sign: float | None = None,
        off: bool = False,
    ) -> _Run:
        """The documents of one call; with `sign` their gradients are added."""
        padded = [
            torch.arange(start, start + length) + row * rows.shape[1]
            for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True))
        ]
        # Lengths (2, 1) in rows of 3, padded on the left: places [1, 2] and [5]; without pads [0, 1] and [2].
        places, shape = padded, rows.shape
        if unpad:
            places, shape = list(torch.arange(rows.num_tokens).split(list(rows.lengths))), (1, rows.num_tokens)
        following = Following(places, shape, handed)
        inexact = last_places_off(self.model) if off else nullcontext()
        on = nullcontext() if unpad else self.unpadding.off()
        with torch.set_grad_enabled(sign is not None), following.attached(self.subject.parts), inexact, on:
            outputs = self._documents(_output(self.model, call), padded, rows.shape)
            if sign is not None and self.subject.trained and any(t.requires_grad for t in outputs):
                self._backward(outputs, sign)
        return _Run([output.detach() for output in outputs], following.traces)

    def alone(self, *, sign: float | None = None, off: bool = False, handed: Sequence[Trace] | None = None) -> _Run:
        """Each document by itself."""
        outputs, traces = [], []
        for i, tokens in enumerate(self.tokens):
            following = Following([torch.arange(len(tokens))], (1, len(tokens)), handed and [handed[i]])
            inexact = last_places_off(self.model) if off else nullcontext()
            with torch.set_grad_enabled(sign is not None), following.attached(self.subject.parts), inexact:
                output = _output(self.model, {"input_ids": tokens[None].to(self.device)})
                found = output[0] if output.dim() > 2 else output
                if sign is not None and self.subject.trained and found.requires_grad:
                    self._backward([found], sign, first=i)
            outputs.append(found.detach())
            traces.append(following.traces[0])
        return _Run(outputs, traces)

    def _documents(self, output: torch.Tensor, padded: list[torch.Tensor], shape: tuple[int, int]) -> Documents:
        """Each document's part of `(B, L, V)`, or its row of `(B, V)`."""
        # A sequence classifier has one output a row, `(B, V)`.
        if output.shape[:2] == shape:
            flat = output.flatten(0, 1)
            return [flat[place] for place in padded]
        return list(output.split(1))

    def _backward(self, outputs: Documents, sign: float, first: int = 0) -> None:
        losses = []
        for i, output in enumerate(outputs):
            generator = torch.Generator().manual_seed(self.seed + 1 + first + i)
            weights = torch.randn(output.shape, generator=generator) / output.shape[-1] ** 0.5
            losses.append((output.float() * weights.to(output.device)).sum())
        with torch.autocast(self.device.type, enabled=False):
            (sign * self.subject.loss_scale * torch.stack(losses).sum()).backward()


class _Found(NamedTuple):
    forward: Finding
    first: str | None
    gradients: Finding | None

    @property
    def excess(self) -> float:
        return max(self.forward.excess, 0.0 if self.gradients is None else self.gradients.excess)


def _measure(comparison: _Comparison) -> dict[str, Any]:
    subject = comparison.subject
    sides = [_compare_side(comparison, left=False), _compare_side(comparison, left=True)]
    if sides[1].excess > 1 and comparison.positions:  # positions are the model's own business: some begin at 2
        sides[1] = _compare_side(comparison, left=True, positions=False)
    if not comparison.unpadding.calls:
        raise UnsupportedModel(
            f"{type(inner_model(subject.model)).__name__} hands its backbone no attention_mask.",
            why=["a padded batch without its mask cannot be told from one without pads"],
            do="Train it padded, or pack it: trl_packfa.patch(model) without unpad.",
        )
    rows = comparison.rows(left=True)
    call = comparison.batch(rows)
    against, seen = "padded", 0.0
    found = max(sides, key=lambda side: side.excess)
    # The model's own padded rows may be wrong: state that runs through pads, frequencies of the longest row.
    if subject.anywhere(not found.excess <= 1):
        alone = _compare(
            subject,
            lambda sign, off, handed: comparison.alone(sign=sign, off=off, handed=handed),
            lambda sign, handed: comparison.run(call, rows, unpad=True, sign=sign, handed=handed),
        )
        if alone.excess <= 1:
            against, seen, found = "alone", found.forward.difference, alone
    plain = comparison.run(call, rows, unpad=True)
    return {
        "difference": found.forward.difference,
        "allowed": found.forward.allowed,
        "gradients": found.gradients and found.gradients.difference,
        "gradients_allowed": found.gradients and found.gradients.allowed,
        "against": against,
        "pads_seen": seen,
        "unshifted": _apart(comparison.run(call, rows, unpad=False), plain),
        "control": _apart(comparison.run(comparison.batch(rows, masked=False), rows, unpad=False), plain),
        "first": found.first,
        "first_gradient": found.gradients.where
        if found.gradients is not None and found.gradients.excess > 1
        else None,
        "dtype": str(compute_dtype(subject.model, plain.outputs[0].dtype)).removeprefix("torch."),
    }


def _compare_side(comparison: _Comparison, *, left: bool, positions: bool = True) -> _Found:
    """Rows padded on one side, with their pads and without; positions of the first count from each row's first
    token, where the model takes them."""
    rows = comparison.rows(left=left)
    call = comparison.batch(rows)
    reference = dict(call)
    if left and positions and comparison.positions:
        reference["position_ids"] = rows.position_ids(comparison.device)
    return _compare(
        comparison.subject,
        lambda sign, off, handed: comparison.run(reference, rows, unpad=False, sign=sign, off=off, handed=handed),
        lambda sign, handed: comparison.run(call, rows, unpad=True, sign=sign, handed=handed),
    )


def _compare(
    subject: Subject,
    reference: Callable[[float | None, bool, Sequence[Trace] | None], _Run],
    other: Callable[[float | None, Sequence[Trace] | None], _Run],
) -> _Found:
    """How far one way to run the rows is from the reference, against what rounding makes of the reference."""
    return subject.finite(lambda: _compare_once(subject, reference, other), lambda found: found.gradients)


def _compare_once(
    subject: Subject,
    reference: Callable[[float | None, bool, Sequence[Trace] | None], _Run],
    other: Callable[[float | None, Sequence[Trace] | None], _Run],
) -> _Found:
    subject.clear()
    # As in `parity.py`: what one way adds to the gradients the other takes away, and the difference is left.
    expected, norms = reference(1.0, False, None), subject.norms()
    dtype, typical = rounding_dtype(subject.model, expected.outputs[0].dtype), subject.chooses
    copied = subject.copied()
    actual = other(-1.0, expected.traces)
    by_other = subject.norms()
    subject.clear()
    if copied is None:
        reference(1.0, False, None)
    else:
        subject.put_back(copied)
    rounded = reference(-1.0, True, expected.traces)
    by_rounding = subject.norms()
    subject.clear()

    def compared(run: _Run) -> dict[tuple[Key, int], float]:
        found = differences(run.traces, expected.traces, typical=typical)
        for i, (one, two) in enumerate(zip(run.outputs, expected.outputs, strict=True)):
            relative = relative_logits if one.shape[-1] > 1 else relative_difference
            found[_OUTPUT, i] = relative(one, two, typical=typical)
        return found

    forward, first = worst(compared(actual), compared(rounded), dtype)
    gradients = None
    if sum(norms):
        by_other, by_rounding = (relative_gradients(by, norms) for by in (by_other, by_rounding))
        gradients = find_worst_gradient(subject.dimensions, by_other, by_rounding, dtype)
    return _Found(forward, first, gradients)


def _apart(run: _Run, expected: _Run) -> float:
    """The largest difference of a document's output, relative."""
    pairs = zip(run.outputs, expected.outputs, strict=True)
    return max(relative_difference(one, two) for one, two in pairs)


def _output(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Logits or hidden states of a call; of a wrapper that returns something else, those of the model inside."""
    outputs = model(**call, use_cache=False)
    for name in ("logits", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    outputs = inner_model(model)(**call, use_cache=False)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
