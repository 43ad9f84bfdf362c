"""RMSNorm and rotary embeddings on a CPU, in pieces of tokens that fit into the cache.

Each is one autograd function. It saves its inputs only, and computes the rest again in the backward. torch's operators
each pass over memory once and save all results between them. Other devices run the model's own code, and so do
compiled graphs, because they fuse these operators themselves.

Shape letters: B rows, L row length, D normalized features, H head dim, R rotated part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Elements of a piece: 1 MB of float32. Half and twice this size were not faster on CPUs with 2 MB per core.
_ELEMENTS = 2**18


def pieces(*tensors: torch.Tensor, like: torch.Tensor, trailing: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same tokens of each tensor `(..., trailing dimensions)`, one piece of `like` at a time.

    Yield the tensors themselves if `like` is one piece.
    """
    if like.numel() <= _ELEMENTS:
        yield tensors
        return
    flat = [tensor.flatten(0, -trailing - 1) for tensor in tensors]
    rows = max(1, _ELEMENTS * len(flat[0]) // like.numel())
    yield from zip(*(tensor.split(rows) for tensor in flat), strict=True)


def are_worth_it(x: torch.Tensor) -> bool:
    """Tell whether pieces make the computation faster: on a CPU, outside of compiled graphs."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm_in_pieces(eps: float, hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    """Compute Llama's RMSNorm of `(..., D)`."""
    return _RMSNorm.apply(hidden, weight, eps)


class _RMSNorm(Function):
    """Autograd function of `x / sqrt(mean(x ** 2) + eps) * weight` for `(..., D)`.

    It computes in float32 up to the product with the weight, and saves its input only.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, weight.dtype))
        rates = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        for x, rate, out in pieces(hidden, rates, normed, like=hidden, trailing=1):
            wide = x.float()
            torch.mean(wide.square(), -1, keepdim=True, out=rate).add_(eps).rsqrt_()
            torch.mul(weight, (wide * rate).to(x.dtype), out=out)
        ctx.save_for_backward(hidden, weight, rates)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, rates = ctx.saved_tensors
        cubes, wide_weight = rates.pow(3).div_(-hidden.shape[-1]), weight.float()
        grad_hidden = hidden.new_empty(hidden.shape)
        grad_weight = torch.zeros_like(wide_weight) if ctx.needs_input_grad[1] else None
        for x, rate, cube, grad, out in pieces(hidden, rates, cubes, grads, grad_hidden, like=hidden, trailing=1):
            x, grad = x.float(), grad.float()
            if grad_weight is not None:
                grad_weight += (grad * x).mul_(rate).flatten(0, -2).sum(0)
            by = grad * wide_weight
            along = torch.linalg.vecdot(by, x).unsqueeze(-1).mul_(cube)
            into = out if out.dtype == torch.float32 else None
            result = torch.addcmul(by.mul_(rate), x, along, out=into)
            if into is None:
                out.copy_(result)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def rotate_in_pieces(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `query` and `key` `(B, L, heads, H)` by `cos` and `sin` `(B or 1, L, R)`, as Llama does.

    transformers negates and joins the halves of every head, multiplies twice and adds, and does the same in the
    backward. This takes a dozen passes over memory. Here there are three passes, in cache.
    """
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
