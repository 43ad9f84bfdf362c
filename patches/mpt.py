"""MPT: one fused projection, clamped in some models, and ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from trl_packfa.attention import AttentionArguments, Bias, linear_bias
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.base import AttentionPatch, Heads


def fused_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> Heads:
    """Compute `Wqkv` of `(B, L, D)` and split it into three `(B, L, heads, H)`."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = mixed.view(*mixed.shape[:-1], 3, module.n_heads, module.head_dim).unbind(-3)
    return query, key, value


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from an MPT attention module."""
    return AttentionArguments(scaling=module.softmax_scale, dropout=module.attn_dropout_p)


def alibi(module: Any, value: torch.Tensor, layout: PackedLayout) -> Bias:
    """Make ALiBi's bias, a slope of the head times the key's position. transformers' model always adds it."""
    # transformers' function makes the slopes, which differ from Bloom's if the number of heads is no power of two. For
    # two positions it returns (-slope, 0), so the difference is the slope.
    slopes = build_mpt_alibi_tensor(module.n_heads, 2, device=value.device).flatten(1)
    return linear_bias(slopes[:, 1] - slopes[:, 0], layout)


PATCH = AttentionPatch(
    model_types=("mpt",),
    backbone="MptModel",
    attention={"MptAttention": fused_qkv},
    output="out_proj",
    arguments=read_arguments,
    bias=alibi,
    makes_mask=True,  # MptModel converts its mask to bool
)
