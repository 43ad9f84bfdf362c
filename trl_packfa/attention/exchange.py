"""Attention over a row that several processes share: tokens are exchanged for heads, and back (DeepSpeed-Ulysses).

Each process holds T / N tokens with all heads. The exchange gives it all T tokens with 1 / N of the heads, so that any
backend computes packed attention with the layout of the whole row. Heads never need each other.

Shape letters: N processes that share a row, T packed tokens of the row, t = T / N tokens of a process, Q query heads,
K key/value heads, H head dim, h heads of a process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import distributed

from ..compile import outside_of_graphs
from ..errors import PackingError
from ..layout import PackedLayout
from ..layout.shard import RowShard
from .base import AttentionArguments

Attend: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout, AttentionArguments], torch.Tensor
]


@outside_of_graphs  # they cannot hold the exchange between processes
def attend_sharded(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    arguments: AttentionArguments,
) -> torch.Tensor:
    """Attend with this process's heads to the whole row, and return its tokens `(t, Q, H)`.

    Query `(t, Q, H)`, key and value `(t, K, H)` are this process's tokens, and `arguments` are for all heads. `attend`
    computes attention of all T tokens. Where K is no multiple of N, key/value heads are repeated. Raise
    [`PackingError`] if N does not divide Q, or a term that depends on tokens is added to the scores.
    """
    shard = layout.shard
    assert shard is not None
    shard.require_divisible(query.shape[1], shard.size)
    if arguments.bias is not None:
        raise PackingError(
            f"a row shared by {shard.size} processes cannot have a term added to its attention scores.",
            why=["ALiBi and sparse indexers compute the term from tokens or heads of the whole row"],
            do="Train this model with sequence_parallel=1.",
        )
    if arguments.sinks is not None:
        arguments = replace(arguments, sinks=shard.local(arguments.sinks))
    repeats = math.lcm(key.shape[1], shard.size) // key.shape[1]
    if repeats > 1:
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    query, key, value = (_to_heads(tokens, shard) for tokens in (query, key, value))
    return _to_tokens(attend(query, key, value, layout.whole, arguments), shard)


def _to_heads(tokens: torch.Tensor, shard: RowShard) -> torch.Tensor:
    # (t, N * h, H) is sent as N parts of h heads; part i received has the tokens of process i.
    parts = tokens.unflatten(1, (shard.size, -1)).transpose(0, 1)
    return _Exchange.apply(parts, shard).flatten(0, 1)  # type: ignore[union-attr]


def _to_tokens(heads: torch.Tensor, shard: RowShard) -> torch.Tensor:
    # (T, h, H) is sent as N parts of t tokens; part i received has the heads of process i.
    parts = heads.unflatten(0, (shard.size, -1))
    return _Exchange.apply(parts, shard).transpose(0, 1).flatten(1, 2)  # type: ignore[union-attr]


class _Exchange(torch.autograd.Function):
    """Autograd function that sends part i of `(N, ...)` to process i; its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, shard: RowShard) -> torch.Tensor:
        ctx.shard = shard
        return _exchanged(parts, shard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.shard), None


def _exchanged(parts: torch.Tensor, shard: RowShard) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    # As bytes: numbers are moved, not computed with, and gloo knows few dtypes.
    distributed.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=shard.group)
    return received
