"""FlashAttention inside torch: `torch.nn.attention.varlen.varlen_attn`, nothing to install.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch

from ..layout import PackedLayout
from .kernel_limits import flash_refusals, require_indexable
from .request import AttentionRequest


@cache
def _varlen_attn() -> Callable[..., torch.Tensor] | None:
    """torch's function, or `None` where torch is older than 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _takes(parameter: str) -> bool:
    """torch 2.10 had `is_causal`, later versions have `window_size` and `enable_gqa`."""
    function = _varlen_attn()
    return function is not None and parameter in inspect.signature(function).parameters


class VarlenBackend:
    """torch's own variable-length FlashAttention."""

    name = "varlen"
    summary = "FlashAttention inside torch (torch >= 2.10), CUDA sm 8.0 and newer, float16 and bfloat16"

    def refusals(self, request: AttentionRequest) -> list[str]:
        """Torch's version, the shared kernel limits, and what the op has no argument for."""
        if _varlen_attn() is None:
            return [f"needs torch >= 2.10, found {torch.__version__}"]
        reasons = flash_refusals(request, min_capability=(8, 0))
        if request.sliding_window is not None and not _takes("window_size"):
            reasons.append(f"sliding windows need a newer varlen_attn than torch {torch.__version__} has")
        if request.softcap is not None:
            reasons.append("varlen_attn has no softcap")
        if request.sinks:
            reasons.append("varlen_attn has no attention sinks")
        if request.dropout:
            reasons.append(f"varlen_attn has no dropout, the model asks for {request.dropout}")
        return reasons

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """See [`AttentionBackend`]."""
        require_indexable(query, layout, self.name)
        if _takes("enable_gqa"):
            options: dict[str, object] = {"enable_gqa": query.shape[1] != key.shape[1]}
        else:
            options = {}
        if _takes("window_size"):
            options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
        else:
            options["is_causal"] = True
        varlen_attn = _varlen_attn()
        assert varlen_attn is not None, "refusals() was not asked"
        offsets, longest = layout.cu_seqlens, layout.max_seqlen
        return varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), offsets, offsets, longest, longest,
            scale=scaling, **options,
        )  # fmt: skip
