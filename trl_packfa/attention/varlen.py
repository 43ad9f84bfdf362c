"""FlashAttention inside torch: `torch.nn.attention.varlen.varlen_attn`, nothing to install.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..layout import PackedLayout
from ..runtime.autocast import cast_to_autocast_dtype
from .base import AttentionArguments, AttentionRequest
from .flash_limits import FLASH, require_indexable

try:
    from torch.nn.attention import varlen
except ImportError:  # torch older than 2.10
    varlen = None
_varlen_attn: Callable[..., Any] | None = None if varlen is None else varlen.varlen_attn

# torch 2.10 had `is_causal`, later versions have `window_size` and `enable_gqa`.
_PARAMETERS = frozenset(inspect.signature(_varlen_attn).parameters) if _varlen_attn is not None else frozenset()


class VarlenBackend:
    """torch's own variable-length FlashAttention."""

    name = "varlen"
    summary = "FlashAttention inside torch (torch >= 2.10), CUDA sm 8.0 and newer, float16 and bfloat16"
    capabilities = replace(FLASH, function="varlen_attn", softcap=False, sinks=False, dropout=False)

    def refusals(self, request: AttentionRequest) -> list[str]:
        """Torch's version, its capabilities, and what this version's op has no argument for."""
        if _varlen_attn is None:
            return [f"needs torch >= 2.10, found {torch.__version__}"]
        reasons = self.capabilities.refusals(request)
        if request.sliding_window is not None and "window_size" not in _PARAMETERS:
            reasons.append(f"sliding windows need a newer varlen_attn than torch {torch.__version__} has")
        return reasons

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        arguments: AttentionArguments,
    ) -> torch.Tensor:
        """See [`AttentionBackend`]."""
        require_indexable(query, layout, self.name)
        assert _varlen_attn is not None, "refusals() was not asked"
        query, key, value = cast_to_autocast_dtype(query, key, value)
        options: dict[str, Any] = {}
        if "enable_gqa" in _PARAMETERS:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        if "window_size" in _PARAMETERS:
            options["window_size"] = ((arguments.sliding_window or 0) - 1, 0)
        else:
            options["is_causal"] = True
        return _varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            layout.cu_seqlens,
            layout.cu_seqlens,
            layout.max_seqlen,
            layout.max_seqlen,
            scale=arguments.scaling,
            **options,
        )
