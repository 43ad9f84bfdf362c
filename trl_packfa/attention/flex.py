"""flex_attention with a block mask of documents: softcap, sinks and odd head sizes on CUDA.

https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

Shape letters: T packed tokens, N query heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..autocast import cast_to_autocast_dtype
from ..compile import allow_graphs
from ..layout import AttentionLayout
from .base import AttentionCall, AttentionRequest
from .block_mask import block_mask
from .capabilities import AttentionBackend, Capabilities

# Largest number of graphs of one function, which serves every model of a process: with and without a window, softcap,
# sinks and gradients, for each dtype, for one block of tokens and for more.
_GRAPHS = 128
# Without this option, rows of fewer than 128 tokens use the decoding kernel. That kernel has no configuration for
# their block mask if heads share keys (pytorch issue 185349). The check must run the training kernel too.
_KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
# Keeps a softcap a number, because torch cannot compile the score function without gradients if it is a tensor.
_SETTINGS: Any = {"specialize_float": True}


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """Compile flex_attention into one kernel.

    Without compilation, it stores all scores. torch falls back to that after eight graphs, so the limit is raised.
    """
    compiled = torch.compile(flex_attention, dynamic=True)

    def attend(*args: Any, **kwargs: Any) -> Any:
        with allow_graphs(_GRAPHS), torch._dynamo.config.patch(**_SETTINGS):
            return compiled(*args, **kwargs)

    return attend


class FlexBackend(AttentionBackend):
    """One compiled kernel. A block mask tells it which key blocks each block of queries can see."""

    name = "flex"
    summary = "flex_attention with a document block mask, compiled; CUDA, softcap, sinks and float32"
    # On a CPU, torch has no backward for it and stores all scores.
    capabilities = Capabilities(
        function="flex_attention",
        needs_cuda=True,
        min_capability=(8, 0),  # the kernel was compiled for it; older GPUs have less shared memory and no bfloat16
        dtypes=(torch.float16, torch.bfloat16, torch.float32),  # Triton's kernel does not support float64
        min_head_dim=16,
        max_head_dim=256,  # at 512 it needs 257 KiB of shared memory, but an H100 has 227 KiB
        dropout=False,
        bias=False,
        bidirectional=True,
    )

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List the limits of the capabilities, and Triton if it is not installed."""
        reasons = self.capabilities.refusals(request)
        if request.device.type == "cuda" and find_spec("triton") is None:
            reasons.append("needs triton, which is not installed")
        return reasons

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        attend = _compiled() if query.device.type == "cuda" else flex_attention
        query, key, value = cast_to_autocast_dtype(query, key, value)
        q_NTH, k_KTH, v_KTH = (x.transpose(0, 1)[None] for x in (*_with_block_sizes(query, key), value))
        result = attend(
            q_NTH,
            k_KTH,
            v_KTH,
            score_mod=None if call.softcap is None else _capped(call.softcap),
            block_mask=_block_mask(call.layout, call.sliding_window),
            scale=call.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=call.sinks is not None,
            kernel_options=_KERNEL_OPTIONS,
        )
        if call.sinks is None:
            return result[0].transpose(0, 1)
        out_NTH, lse_NT = result[0][0], result[1][0]
        # A sink adds exp(sink) to the softmax denominator, so all probabilities shrink by the same factor.
        share_NT = torch.sigmoid(lse_NT - call.sinks.to(lse_NT.dtype)[:, None])
        return (out_NTH * share_NT[..., None].to(out_NTH.dtype)).transpose(0, 1)


def _with_block_sizes(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad float32 queries and keys `(T, N, H)` of 129 to 255 features with zeros to 256, which changes no score.

    For 192 features, as in multi-head latent attention, torch 2.11 chooses blocks that need 273 KiB of shared memory,
    and an H100 has 227 KiB. For 256 features its blocks fit.
    """
    width = query.shape[-1]
    if query.dtype != torch.float32 or not 128 < width < 256:
        return query, key
    return F.pad(query, (0, 256 - width)), F.pad(key, (0, 256 - width))


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _block_mask(layout: AttentionLayout, sliding_window: int | None) -> BlockMask:
    """Return the layout's block mask. Build it once per batch and window."""
    key = ("flex", sliding_window)
    if key not in layout.memo:
        layout.memo[key] = block_mask(layout, sliding_window)
    return layout.memo[key]
