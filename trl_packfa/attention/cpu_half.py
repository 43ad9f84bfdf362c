"""Causal attention in half precision on a CPU, with the faster dtype for the forward and for the backward.

This module calls the forward kernel and the backward kernel of torch's CPU attention separately. On a CPU with half
precision products, the forward is two to three times as fast in half precision as in float32. The backward is faster
in float32, except for long documents in bfloat16 with AMX, because its cost per block is high. Short documents, and
CPUs that emulate half precision, use float32 for both.

Shape letters: G documents of a group, L their longest length, N query heads, K key/value heads, R query heads that
share one of them, H head dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..autocast import HALF, has_half_products

# Longest document times head dim up to which float32 is faster: for forward and backward, and for the backward in
# bfloat16 with AMX. Measured for heads of 64, 80 and 128 features with AVX512-BF16 and AMX.
_ALL_IN_FLOAT32, _BACKWARD_IN_FLOAT32 = 256 * 64, 512 * 64
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def is_faster_in_float32(query: torch.Tensor, dtype: torch.dtype, *, fused: bool) -> bool:
    """Tell whether attention of a group `(G, N, L, H)` in `dtype` is faster, and more exact, in float32.

    `fused` says that torch's kernel computes it, with or without a mask.
    """
    device = query.device.type
    if dtype not in HALF or device != "cpu":
        return False
    return not has_half_products(dtype, device) or (fused and _size(query) <= _ALL_IN_FLOAT32)


def has_two_halves(query: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether [`CausalInHalf`] can compute plain causal attention of a group's query `(G, N, L, H)` and value."""
    return (
        query.device.type == "cpu"
        and dtype in HALF
        and query.shape[-1] == value.shape[-1]
        # Without these kernels torch's public function is used.
        and all(hasattr(torch.ops.aten, name) for name in (_KERNEL, f"{_KERNEL}_backward"))
    )


@cache
def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _size(query: torch.Tensor) -> int:
    return query.shape[2] * query.shape[3]


class CausalInHalf(torch.autograd.Function):
    """Causal attention of query `(G, N, L, H)` and key, value `(G, K, L, H)` in one half-precision dtype.

    The result is `(G, N, L, H)`. It saves the inputs and the result for the backward, without float32 copies and
    without repeated key/value heads.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """Compute the forward in half precision."""
        q, k, v = (_by_head(x, key.shape[1], x.dtype) for x in (query, key, value))
        kernel = getattr(torch.ops.aten, _KERNEL)
        result, logsumexp = kernel(q, k.expand_as(q), v.expand_as(q), 0.0, True, scale=scaling)
        out = _by_token(result, query)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the backward in float32, except for long documents in bfloat16 with AMX."""
        *qkv, out, logsumexp = ctx.saved_tensors
        query, key, _ = qkv
        is_native = query.dtype is torch.bfloat16 and _has_amx() and _size(query) > _BACKWARD_IN_FLOAT32
        dtype = query.dtype if is_native else torch.float32
        q, k, v, result, upstream = (_by_head(x, key.shape[1], dtype) for x in (*qkv, out, grad))
        kernel = getattr(torch.ops.aten, f"{_KERNEL}_backward")
        by_qkv = kernel(upstream, q, k.expand_as(q), v.expand_as(q), result, logsumexp, 0.0, True, scale=ctx.scaling)
        return *(_by_token(by, x) for by, x in zip(by_qkv, qkv, strict=True)), None


def _by_head(x: torch.Tensor, num_key_value_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy heads `(G, heads, L, H)` to `(G K, R, L, H)`, each head contiguous.

    That is faster, and the R query heads of a key/value head share it without a copy.
    """
    x_GKRLH = x.unflatten(1, (num_key_value_heads, -1))
    return x.new_empty(x_GKRLH.shape, dtype=dtype).copy_(x_GKRLH).flatten(0, 1)


def _by_token(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy `(G K, R, L, H)` back to `(G, heads, L, H)`, with the heads of a token side by side.

    If `like` has K heads, each one gets the sum over R.
    """
    groups, heads, length, features = like.shape
    x_GKRLH = x.unflatten(0, (groups, -1))
    if x_GKRLH.shape[1] * x_GKRLH.shape[2] != heads:
        x_GKRLH = x_GKRLH.sum(2, keepdim=True)
    out_GLKRH = like.new_empty(groups, length, *x_GKRLH.shape[1:3], features)
    return out_GLKRH.copy_(x_GKRLH.permute(0, 3, 1, 2, 4)).flatten(2, 3).transpose(1, 2)
