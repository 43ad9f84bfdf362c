"""FlashAttention of torch itself, `torch.nn.attention.varlen.varlen_attn`. Nothing needs to be installed.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..autocast import cast_to_autocast_dtype
from .base import AttentionCall, AttentionRequest
from .capabilities import AttentionBackend
from .flash import FLASH, equally_wide

try:
    from torch.nn.attention import varlen
except ImportError:  # torch older than 2.10
    varlen = None
_varlen_attn: Callable[..., Any] | None = None if varlen is None else varlen.varlen_attn

# torch 2.10 has `is_causal`; later versions have `scale`, `window_size` and `enable_gqa`.
_PARAMETERS = frozenset(inspect.signature(_varlen_attn).parameters) if _varlen_attn is not None else frozenset()
# Half-precision numbers in 16 bytes, which kernels read at once.
_ALIGNED = 8


class VarlenBackend(AttentionBackend):
    """Attention backend of torch's own variable-length FlashAttention."""

    name = "varlen"
    summary = "FlashAttention inside torch (torch >= 2.10), CUDA sm 8.0 and newer, float16 and bfloat16"
    capabilities = replace(FLASH, function="varlen_attn", softcap=False, sinks=False, dropout=False)

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List a too old torch, the limits of the capabilities, and missing arguments of the installed version."""
        if _varlen_attn is None:
            return [f"needs torch >= 2.10, found {torch.__version__}"]
        reasons = self.capabilities.refusals(request)
        if request.sliding_window is not None and "window_size" not in _PARAMETERS:
            reasons.append(f"sliding windows need a newer varlen_attn than torch {torch.__version__} has")
        return reasons

    def is_traceable(self, device: torch.device) -> bool:
        """Return true: torch registers the kernel as an operator."""
        return True

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        assert _varlen_attn is not None, "refusals() was not asked"
        value_dim = value.shape[-1]
        query, key, value = equally_wide(*cast_to_autocast_dtype(query, key, value))
        queries, keys = call.layout.queries, call.layout.keys
        options: dict[str, Any] = {}
        if "scale" in _PARAMETERS:
            options["scale"] = call.scaling
        elif (factor := call.scaling * query.shape[-1] ** 0.5) != 1.0:
            query = query * factor  # torch 2.10 always scales by the root of the head dim
        if "enable_gqa" in _PARAMETERS:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        if "window_size" in _PARAMETERS:
            side = (call.sliding_window or 0) - 1  # -1: all keys
            options["window_size"] = (side, 0 if call.layout.causal else side)
        else:
            options["is_causal"] = call.layout.causal
        out = _varlen_attn(
            *map(_as_kernels_read, (query, key, value)),
            # With more keys than queries, the kernels align both at the end of the segment.
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.max_seqlen,
            keys.max_seqlen,
            **options,
        )
        return out[..., :value_dim]


def _as_kernels_read(x: torch.Tensor) -> torch.Tensor:
    """Return heads `(T, N, H)` in a memory layout that the kernels can read.

    Heads stay as they are if each one is contiguous and begins at a multiple of 16 bytes, as in the fused projections
    of Phi-3. Otherwise they are copied. In graphs they are always made contiguous, because torch derives the layout of
    results from dense inputs.
    """
    if torch.compiler.is_compiling():
        return x.contiguous()
    *steps, last = x.stride()
    is_aligned = all(number % _ALIGNED == 0 for number in (*steps, x.storage_offset()))
    return x if last == 1 and is_aligned and min(steps) > 0 else x.contiguous()
