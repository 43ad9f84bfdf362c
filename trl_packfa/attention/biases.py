"""Terms that a model adds to the scores of its attention: sparse key selection, position bias.

A term is computed for a chunk of queries at a time, from the indices of packed tokens. Padding has an index that no
token has.

Shape letters: T packed tokens, N query heads, G documents of a group, Q queries of a chunk, M keys, K chosen keys.
"""

from __future__ import annotations

import torch

from ..layout import PackedLayout
from .base import Bias


def chosen_keys(indices: torch.Tensor, layout: PackedLayout) -> Bias:
    """Make a bias that hides all keys except the ones that an indexer chose for each query.

    `indices` `(B, L, K)` are positions inside the document, -1 for no key.
    """
    indices_TK = indices.flatten(0, 1).long()
    starts_T = torch.repeat_interleave(
        layout.cu_seqlens[:-1].long(), layout.cu_seqlens.diff(), output_size=layout.num_tokens
    )

    def bias(queries_GQ: torch.Tensor, keys_GM: torch.Tensor) -> torch.Tensor:
        chosen_GQK = _at(indices_TK, queries_GQ) + 1
        seen_GQM = chosen_GQK.new_zeros((*queries_GQ.shape, layout.max_seqlen + 1), dtype=torch.bool)
        seen_GQM.scatter_(-1, chosen_GQK.clamp(max=layout.max_seqlen), True)
        places_GM = (keys_GM - _at(starts_T, keys_GM) + 1).clamp(max=layout.max_seqlen)
        seen = seen_GQM.gather(-1, places_GM[:, None].expand(*queries_GQ.shape, -1))
        return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))[:, None]

    return bias


def linear_bias(slopes: torch.Tensor, layout: PackedLayout) -> Bias:
    """Make ALiBi's bias: `slopes` `(N,)` of the heads times the key's position in its document."""
    positions_T = layout.position_ids().flatten().to(slopes)

    def bias(queries_GQ: torch.Tensor, keys_GM: torch.Tensor) -> torch.Tensor:
        return slopes[:, None, None] * _at(positions_T, keys_GM)[:, None, None]

    return bias


def key_bias(bias_TN: torch.Tensor, *, keep: int, sliding_window: int | None = None) -> Bias:
    """Make a bias from a value of each key and head, `bias_TN` `(T, N)`.

    A query that could attend to more than `keep` keys attends only to the `keep` keys with the largest values.
    """

    def bias(queries_GQ: torch.Tensor, keys_GM: torch.Tensor) -> torch.Tensor:
        bias_GNQM = _at(bias_TN, keys_GM).transpose(1, 2)[:, :, None]
        if keys_GM.shape[1] <= keep:
            return bias_GNQM
        distance = queries_GQ[:, None, :, None] - keys_GM[:, None, None]
        hidden = distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
        seen = bias_GNQM.masked_fill(hidden, float("-inf"))
        kept = torch.zeros_like(seen, dtype=torch.bool).scatter(-1, seen.topk(keep, dim=-1).indices, True)
        return seen.masked_fill(~kept, float("-inf"))

    return bias


def _at(per_token: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor `(T, ...)` by token index. Rows of padding are arbitrary."""
    return per_token[numbers.clamp(max=len(per_token) - 1)]
