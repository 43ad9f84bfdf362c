"""Limits of all FlashAttention kernels, from any package."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from ..errors import NoBackend
from ..layout import PackedLayout
from .capabilities import HALF, Capabilities

# Capabilities of all FlashAttention kernels. The arguments of their functions differ.
FLASH = Capabilities(
    function="flash_attn_varlen_func",
    needs_cuda=True,
    min_capability=(8, 0),
    dtypes=HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    bias=False,
    bidirectional=True,
)
# FlashAttention 2's backward indexes its padded accumulator, (T + 128 * S) * N * H elements, with 32-bit integers
# (flash-attention issue 1311).
_PADDED_TOKENS_PER_DOCUMENT = 128
_MAX_ELEMENTS = 2**31


def equally_wide(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad query `(T, N, H)`, key and value `(T, K, H)` with zeros to the larger head dim of both.

    These kernels support one head dim only. Zeros change no score, and they make the last features of the result zero.
    """
    # In multi-head latent attention, queries and keys of 192 and values of 128 features become 192 and 192.
    width = max(query.shape[-1], value.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return q, k, v


def is_deterministic() -> bool:
    """Tell whether the user asks for deterministic gradients, by torch's setting or by flash-attn's variable."""
    return torch.are_deterministic_algorithms_enabled() or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"


def require_indexable(query: torch.Tensor, layout: PackedLayout, backend: str) -> None:
    """Raise [`NoBackend`] for a batch that overflows the 32-bit index of FlashAttention 2's backward.

    Gradients would be wrong without an error.
    """
    _, num_heads, head_dim = query.shape
    padded = layout.num_tokens + _PADDED_TOKENS_PER_DOCUMENT * layout.num_documents
    if query.requires_grad and padded * num_heads * head_dim >= _MAX_ELEMENTS:
        raise NoBackend(
            f"attention backend '{backend}' cannot index this batch: {layout.num_tokens} tokens in "
            f"{layout.num_documents} documents, {num_heads} heads of {head_dim}.",
            why=[
                f"(tokens + 128 * documents) * heads * head_dim is {padded * num_heads * head_dim}, "
                "but must be less than 2^31"
            ],
            do="Lower per_device_train_batch_size or max_length, or choose attention_backend='flex' or 'sdpa'.",
        )
