"""Bloom: one fused projection, ALiBi, and an attention module that adds the residual."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import dropout_add

from trl_packfa.attention import AttentionArguments, Bias, linear_bias
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.base import AttentionPatch, Heads


def fused_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> Heads:
    """Compute `query_key_value` of `(B, L, D)` and split it, interleaved by head, into three `(B, L, heads, H)`."""
    # `_reshape` returns `(B, heads, L, H)`; backends take tokens before heads.
    query, key, value = (t.transpose(1, 2) for t in module._reshape(module.query_key_value(hidden_states)))
    return query, key, value


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from a Bloom attention module."""
    return AttentionArguments(scaling=module.inv_norm_factor, dropout=module.attention_dropout.p)


def alibi(module: Any, value: torch.Tensor, layout: PackedLayout) -> Bias:
    """Make ALiBi's bias (arXiv 2108.12409): a slope of the head times the key's position in its document."""
    return linear_bias(alibi_slopes(module.num_heads).to(value.device), layout)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return ALiBi's slopes, float32, shape `(N,)`.

    They are a geometric series for the largest power of two of heads. The other heads use every other term of the
    series for twice as many heads.
    """
    # 3 heads: 2 ** -4 and 2 ** -8 from the series for two heads, then 2 ** -2 from the series for four.
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes)


def project_and_add(module: Any, attended: torch.Tensor, args: tuple[Any, ...]) -> tuple[torch.Tensor, None]:
    """Apply the output projection and dropout, and add the residual, the first argument after the hidden states."""
    return dropout_add(module.dense(attended), args[0], module.hidden_dropout, module.training), None


PATCH = AttentionPatch(
    model_types=("bloom",),
    backbone="BloomModel",
    attention={"BloomAttention": fused_qkv},
    arguments=read_arguments,
    bias=alibi,
    finish=project_and_add,
    makes_mask=True,  # BloomModel counts positions for its ALiBi along a mask of two dimensions
)
