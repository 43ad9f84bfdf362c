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

from ..errors import PackingError
from ..layout import PackedLayout
from ..layout.shard import RowShard
from .base import AttentionArguments

Attend: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout, AttentionArguments], torch.Tensor
]

Move: TypeAlias = Callable[[torch.Tensor, RowShard], torch.Tensor]


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
    query, key, value = (_Exchange.apply(heads, shard, _to_heads, _to_tokens) for heads in (query, key, value))
    return _Exchange.apply(attend(query, key, value, layout.whole, arguments), shard, _to_tokens, _to_heads)


class _Exchange(torch.autograd.Function):
    """Autograd function of an exchange between `(t, N * h, H)` and `(T, h, H)`; its backward is the exchange back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: RowShard, there: Move, back: Move) -> torch.Tensor:
        ctx.shard, ctx.back = shard, back
        return there(x, shard)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.shard), None, None, None


def _to_heads(tokens: torch.Tensor, shard: RowShard) -> torch.Tensor:
    # (t, N * h, H) is sent as N parts of h heads; part i received has the tokens of process i.
    parts = tokens.unflatten(1, (shard.size, -1)).transpose(0, 1)
    return _exchanged(parts, shard).flatten(0, 1)


def _to_tokens(heads: torch.Tensor, shard: RowShard) -> torch.Tensor:
    # (T, h, H) is sent as N parts of t tokens; part i received has the heads of process i.
    parts = heads.unflatten(0, (shard.size, -1))
    return _exchanged(parts, shard).transpose(0, 1).flatten(1, 2)


def _exchanged(parts: torch.Tensor, shard: RowShard) -> torch.Tensor:
    """Send part i of `(N, ...)` to process i, and return the parts that the processes sent to this one."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    # As bytes: numbers are moved, not computed with, and gloo knows few dtypes.
    distributed.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=shard.group)
    return received
