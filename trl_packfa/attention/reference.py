"""The reference implementation: one dense attention per segment, in the query's dtype.

It is slow and quadratic in the longest document. It is for tests and for reading. `"auto"` never chooses it.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim, L a document's queries, M its keys.
"""

from __future__ import annotations

import torch

from .base import AttentionArguments, AttentionCall
from .capabilities import AttentionBackend, Capabilities


class ReferenceBackend(AttentionBackend):
    """The reference backend: plain torch, document by document."""

    name = "reference"
    summary = "plain torch loop, the reference for all backends; tests only"
    capabilities = Capabilities(function="plain torch", is_selectable=False, bidirectional=True)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        queries, keys = call.layout.queries, call.layout.keys
        outputs, numbers = [], queries.split(torch.arange(queries.num_tokens, device=query.device))
        segments = zip(queries.split(query), keys.split(key), keys.split(value), numbers, strict=True)
        for q_LNH, k_MKH, v_MKH, numbers_L in segments:
            # The queries are the last tokens of the segment: with 5 keys and 2 queries, they are tokens 3 and 4.
            index = torch.arange(len(k_MKH), device=query.device)
            distance = index[len(k_MKH) - len(q_LNH) :, None] - index[None, :]
            # A window without causality reaches as far to the right as to the left.
            distance = distance if call.layout.causal else distance.abs()
            allowed = (distance >= 0) & (distance < (call.sliding_window or len(k_MKH)))
            q_NLH, k_KMH, v_KMH = q_LNH.transpose(0, 1), k_MKH.transpose(0, 1), v_MKH.transpose(0, 1)
            bias = None if call.bias is None else call.bias(numbers_L[None], numbers_L[None])[0]
            outputs.append(dense_attention(q_NLH, k_KMH, v_KMH, allowed, call, bias).transpose(0, 1))
        return torch.cat(outputs)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    arguments: AttentionArguments,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by its formula.

    Shapes: `query` `(..., N, Q, H)`, `key` and `value` `(..., K, M, H)`, `allowed` `(Q, M)` or `(..., 1, Q, M)` bool,
    `bias` `(..., 1 or N, Q, M)`, which is added to the scores. The softcap is applied before masking (Gemma-2). A sink
    is one more logit per head; its probability is dropped (gpt-oss). Probabilities are computed in at least float32.
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    scores = (query @ key.transpose(-1, -2)) * arguments.scaling
    if arguments.softcap is not None:
        scores = arguments.softcap * torch.tanh(scores / arguments.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    if arguments.sinks is not None:
        sink_column = arguments.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    accumulate = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=accumulate)[..., : key.shape[-2]].to(query.dtype)
    return torch.dropout(weights, arguments.dropout, train=arguments.dropout > 0) @ value
