"""Convert packed tokens of documents that share prefixes to whole documents, and back.

Shape letters: T packed tokens, P tokens of all documents (a shared one counts in each), M keys of all segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..branches import BranchedLayout, Copies, Run


def spread(packed: torch.Tensor, layout: BranchedLayout) -> torch.Tensor:
    """Return each document's tokens `(P, ...)` from packed tokens `(T, ...)`; gradients of a shared token are
    added."""
    if _by_number(packed):
        return packed.index_select(0, layout.along)
    return _Spread.apply(packed, layout.copies)  # type: ignore[return-value]


def spread_keys(packed: torch.Tensor, layout: BranchedLayout) -> torch.Tensor:
    """Return for each segment the keys that its tokens may attend to, `(M, ...)`, from packed tokens `(T, ...)`."""
    if _by_number(packed):
        return packed.index_select(0, layout.key_tokens)
    return _Spread.apply(packed, layout.key_copies)  # type: ignore[return-value]


def collect(documents: torch.Tensor, layout: BranchedLayout) -> torch.Tensor:
    """Return packed tokens `(T, ...)` from the documents' tokens `(P, ...)`; a shared token comes from its first
    document."""
    if _by_number(documents):
        return documents.index_select(0, layout.places)
    return _Collect.apply(documents, layout.copies)  # type: ignore[return-value]


def _by_number(tensor: torch.Tensor) -> bool:
    """Tell whether to copy tokens by index, in one launch on accelerators; on a CPU they are copied run by run."""
    # On a CPU adding the gradients of 4,096 tokens with 576 features takes hundreds of times longer by index.
    return tensor.device.type != "cpu" or torch.compiler.is_compiling()


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        spread = packed.new_empty(copies.num_places, *packed.shape[1:])
        for tokens, places in _pairs(packed, spread, (*copies.first, *copies.again)):
            places.copy_(tokens)
        return spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        copies = ctx.copies
        packed = _first_of_each(gradient, copies)
        for tokens, places in _pairs(packed, gradient, copies.again):
            tokens.add_(places)
        return packed, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spread: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return _first_of_each(spread, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        copies = ctx.copies
        spread = gradient.new_empty(copies.num_places, *gradient.shape[1:])
        for tokens, places in _pairs(gradient, spread, copies.first):
            places.copy_(tokens)
        for _, places in _pairs(gradient, spread, copies.again):
            places.zero_()
        return spread, None


def _first_of_each(spread: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return packed tokens `(T, ...)`, each from its first copy: every token has one, so all are written."""
    packed = spread.new_empty(copies.num_tokens, *spread.shape[1:])
    for tokens, places in _pairs(packed, spread, copies.first):
        tokens.copy_(places)
    return packed


def _pairs(
    packed: torch.Tensor, spread: torch.Tensor, runs: Sequence[Run]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each run its tokens in the row and its places among the copies, as views."""
    for start, place, length in runs:
        yield packed[start : start + length], spread[place : place + length]
