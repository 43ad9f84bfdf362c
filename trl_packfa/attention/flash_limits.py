"""Limits that the FlashAttention kernels share, whichever package they come from."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from ..errors import NoBackend
from ..layout import PackedLayout
from .capabilities import HALF, Capabilities

# Of every FlashAttention kernel; what its function has arguments for differs.
FLASH = Capabilities(
    function="flash_attn_varlen_func",
    needs_cuda=True,
    min_capability=(8, 0),
    dtypes=HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    bias=False,
)
# FlashAttention 2's backward indexes its padded accumulator, (T + 128 * S) * N * H elements, with 32-bit integers
# (flash-attention issue 1311).
_PADDED_TOKENS_PER_DOCUMENT = 128
_MAX_ELEMENTS = 2**31


def equally_wide(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query `(T, N, H)`, key and value `(T, K, H)` with one head dim, the wider: these kernels know no other. What is
    narrower gets zeros, which change no score and fill the result's last features."""
    # Of multi-head latent attention, queries and keys of 192 and values of 128 features come out as 192 and 192.
    width = max(query.shape[-1], value.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return q, k, v


def is_deterministic() -> bool:
    """Whether the run asks for gradients that are the same to the bit every time, in torch's or flash-attn's words."""
    return torch.are_deterministic_algorithms_enabled() or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"


def require_indexable(query: torch.Tensor, layout: PackedLayout, backend: str) -> None:
    """Refuse a batch whose backward would overflow FlashAttention 2's 32-bit index (silent garbage otherwise)."""
    _, num_heads, head_dim = query.shape
    padded = layout.num_tokens + _PADDED_TOKENS_PER_DOCUMENT * layout.num_documents
    if query.requires_grad and padded * num_heads * head_dim >= _MAX_ELEMENTS:
        raise NoBackend(
            f"attention backend '{backend}' cannot index this batch: {layout.num_tokens} tokens in "
            f"{layout.num_documents} documents, {num_heads} heads of {head_dim}.",
            why=[f"(tokens + 128 * documents) * heads * head_dim is {padded * num_heads * head_dim}, the limit 2^31"],
            do="Lower per_device_train_batch_size or max_length, or choose attention_backend='flex' or 'sdpa'.",
        )
