"""flex_attention's block mask, made of document offsets alone.

torch's `create_block_mask` first asks for every pair of tokens, T x T, which packing must never build. Documents are
contiguous, so the blocks of keys that a block of queries sees are too: from the one that holds its first query's
first key, up to its own. Those that every query sees whole need no look at single pairs.

https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

Shape letters: T packed tokens, R blocks of tokens.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..layout import PackedLayout

BLOCK = 128  # tokens; what flex_attention's kernels are made for


def block_mask(layout: PackedLayout, sliding_window: int | None) -> BlockMask:
    """Causal attention inside each document, over the keys of a window if there is one; waits for no device."""
    tokens, device = layout.num_tokens, layout.cu_seqlens.device
    block_R = torch.arange(-(-tokens // BLOCK), dtype=torch.int32, device=device)
    begin_R, whole_R = _visible_blocks(block_R, layout, sliding_window)
    step_R, own_R1 = block_R[None], block_R[:, None]
    partial_RR = begin_R[:, None] + step_R
    partial_RR = torch.where(partial_RR < whole_R[:, None], partial_RR, own_R1)  # the last one is their own
    whole_RR = (whole_R[:, None] + step_R).clamp(max=len(block_R) - 1)
    ids_T = layout.document_ids().flatten()

    def same_document(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        allowed = (ids_T[q] == ids_T[kv]) & (q >= kv)
        return allowed if sliding_window is None else allowed & (q - kv < sliding_window)

    return BlockMask.from_kv_blocks(
        (whole_R - begin_R + 1)[None, None],
        partial_RR[None, None],
        (block_R - whole_R)[None, None],
        whole_RR[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=same_document,
        seq_lengths=(tokens, tokens),
    )


def _visible_blocks(
    block_R: torch.Tensor, layout: PackedLayout, sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries the first block of keys that one of them sees, and the first that all see whole: from
    there to the block before its own; its own number where there is none."""
    first_R, last_R = block_R * BLOCK, (block_R + 1) * BLOCK - 1
    seen_by_first, seen_by_last = (_first_key(q, layout, sliding_window) for q in (first_R, last_R))
    # Documents of 200 and 100 tokens, blocks of 128: the last queries of the blocks see keys from [0, 200, 200] on, so
    # that whole blocks begin at [0, 2, 2]; at most their own, [0, 1, 2]. The first seen are in blocks [0, 0, 1].
    whole_R = (seen_by_last + BLOCK - 1) // BLOCK
    # Kernels look at single pairs where a block is not full of queries.
    whole_R = torch.where(last_R < layout.num_tokens, whole_R, block_R)
    return seen_by_first // BLOCK, torch.minimum(whole_R, block_R)


def _first_key(query_R: torch.Tensor, layout: PackedLayout, sliding_window: int | None) -> torch.Tensor:
    """Number of the first token that each of these tokens sees."""
    offsets = layout.cu_seqlens
    # A token at an offset begins its document: with offsets [0, 3, 5] tokens [0, 2, 3, 4] see from [0, 0, 3, 3] on.
    starts = offsets[:-1][torch.searchsorted(offsets[1:-1], query_R, right=True)]
    return starts if sliding_window is None else starts.maximum(query_R - sliding_window + 1)
