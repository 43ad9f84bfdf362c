"""flex_attention's block mask, made from document offsets only.

torch's `create_block_mask` first computes every pair of tokens, T x T, which packing must never build. Documents are
contiguous, so the key blocks that a block of queries sees are contiguous too. They begin at the block with the first
key of the first query, and end at the block with the last key of the last query. Key blocks that every query sees
whole need no test of single pairs.

https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

Shape letters: T packed tokens, R blocks of queries, M blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..layout import AttentionLayout, PackedLayout

BLOCK = 128  # tokens; the block size of flex_attention's kernels


def block_mask(layout: AttentionLayout, sliding_window: int | None) -> BlockMask:
    """Make the block mask of attention inside each segment, causal or not, with or without a sliding window.

    The host does not wait for the device.
    """
    queries, keys = layout.queries, layout.keys
    tokens, device = queries.num_tokens, queries.cu_seqlens.device
    block_R = torch.arange(-(-tokens // BLOCK), dtype=torch.int32, device=device)
    step_M = torch.arange(-(-keys.num_tokens // BLOCK), dtype=torch.int32, device=device)
    begin_R, whole_R, rest_R, stop_R = (x[:, None] for x in _visible_blocks(block_R, layout, sliding_window))
    partial_RM = begin_R + step_M
    partial_RM = torch.where(partial_RM < whole_R, partial_RM, partial_RM + (rest_R - whole_R)).clamp(max=step_M[-1])
    whole_RM = (whole_R + step_M).clamp(max=step_M[-1])
    numbers = ((whole_R - begin_R) + (stop_R - rest_R), rest_R - whole_R)
    return BlockMask.from_kv_blocks(
        numbers[0][None, None, :, 0],
        partial_RM[None, None],
        numbers[1][None, None, :, 0],
        whole_RM[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=_keys_between(layout, sliding_window)
        if layout.has_own_keys or not layout.causal
        else _same_document(queries, sliding_window),
        seq_lengths=(tokens, keys.num_tokens),
    )


def _same_document(layout: PackedLayout, sliding_window: int | None) -> Callable[..., torch.Tensor]:
    """Make the function that tells flex_attention which pairs of query and key are allowed."""
    ids_T = layout.document_ids().flatten()

    def allow(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        allowed = (ids_T[q] == ids_T[kv]) & (q >= kv)
        return allowed if sliding_window is None else allowed & (q - kv < sliding_window)

    return allow


def _keys_between(layout: AttentionLayout, sliding_window: int | None) -> Callable[..., torch.Tensor]:
    """Make the function that allows pairs of query and key by the first and the last key that each query sees."""
    query_T = torch.arange(layout.queries.num_tokens, device=layout.queries.cu_seqlens.device)
    first_T, last_T = _seen_keys(query_T, layout, sliding_window)

    def allow(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv >= first_T[q]) & (kv <= last_T[q])

    return allow


def _visible_blocks(
    block_R: torch.Tensor, layout: AttentionLayout, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the range of visible key blocks for each block of queries, as four block numbers.

    They are the first block that some query sees, the first block that all queries see whole, the first block after
    the whole ones, and the first block after all visible ones.
    """
    first_R, last_R, tokens = block_R * BLOCK, (block_R + 1) * BLOCK - 1, layout.queries.num_tokens
    (begin_R, whole_until_R), (whole_from_R, end_R) = (
        _seen_keys(query_R.clamp(max=tokens - 1), layout, sliding_window) for query_R in (first_R, last_R)
    )
    # Example: documents of 200 and 100 tokens, blocks of 128. The last query of each block sees keys from
    # [0, 200, 200] on, so whole blocks begin at [0, 2, 2]. The first query of each block sees keys up to
    # [0, 128, 256], so whole blocks end before [0, 1, 2]. No block is whole. The first visible blocks are [0, 0, 1],
    # the last ones [0, 1, 2].
    whole_R, rest_R = (whole_from_R + BLOCK - 1) // BLOCK, (whole_until_R + 1) // BLOCK
    stop_R = end_R // BLOCK + 1
    # A block that is not full of queries needs the test of single pairs.
    none = (rest_R <= whole_R) | (last_R >= tokens)
    return begin_R // BLOCK, torch.where(none, stop_R, whole_R), torch.where(none, stop_R, rest_R), stop_R


def _seen_keys(
    query_R: torch.Tensor, layout: AttentionLayout, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the first and of the last key that each of these queries sees."""
    # With offsets [0, 3, 5], tokens [0, 2, 3, 4] belong to documents [0, 0, 1, 1]. If the offsets of the keys are
    # [0, 3, 8], queries 3 and 4 see keys from 3 up to 6 and 7; without causality, both see keys up to 7.
    queries, keys = layout.queries.cu_seqlens, layout.keys.cu_seqlens
    document_R = torch.searchsorted(queries[1:-1], query_R, right=True)
    first_R, end_R = keys[:-1][document_R], keys[1:][document_R] - 1
    own_R = end_R + 1 - queries[1:][document_R] + query_R
    last_R = own_R if layout.causal else end_R
    if sliding_window is None:
        return first_R, last_R
    return first_R.maximum(own_R - sliding_window + 1), last_R.minimum(own_R + sliding_window - 1)
