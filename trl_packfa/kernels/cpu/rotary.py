"""Rotary embeddings of queries and keys on a CPU.

transformers negates and joins the halves of every head, multiplies twice and adds, and does the same in the backward.
This takes a dozen passes over memory. Here there are three passes, in cache.

Shape letters: B rows, L row length, H head dim, R rotated part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .pieces import pieces


def rotate_in_pieces(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, as Llama does."""
    tables = (table.expand(len(query), -1, -1).unsqueeze(2) for table in (cos, sin))
    return _Rotate.apply(query, key, *tables)  # type: ignore[return-value]


class _Rotate(Function):
    """Autograd function that rotates queries and keys `(B, L, heads, H)` by tables `(B, L, 1, R)`."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _rotated((query, key), cos, sin, forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return *_rotated(grads, *ctx.saved_tensors, forward=False), None, None


def _rotated(
    heads: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, *, forward: bool
) -> tuple[torch.Tensor, ...]:
    """Compute `x cos + rotate_half(x) sin` for each of `heads`, or the gradient if not `forward`.

    The gradient uses the transpose of the rotation matrix, in which the sines of both halves are swapped.
    """
    outs = tuple(x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype)) for x in heads)
    for cosines, all_sines, *parts in pieces(cos, sin, *heads, *outs, like=heads[0], trailing=2):
        low, high = all_sines.chunk(2, dim=-1)
        sines = (low, high, -1) if forward else (high, low, 1)
        for x, out in zip(parts[: len(heads)], parts[len(heads) :], strict=True):
            _rotate_into(out, x, cosines, *sines)
    return outs


def _rotate_into(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, low: torch.Tensor, high: torch.Tensor, sign: int
) -> None:
    width = cos.shape[-1]
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
        out, x = out[..., :width], x[..., :width]
    torch.mul(x, cos, out=out)
    (x_low, x_high), (out_low, out_high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_low.addcmul_(x_high, low, value=sign)
    out_high.addcmul_(x_low, high, value=-sign)
