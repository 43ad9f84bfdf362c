"""MPT: one fused projection, perhaps clamped, and ALiBi."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from trl_packfa.attention import AttentionArguments, Bias, linear_bias
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.base import Patch


def fused_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Wqkv` of `(B, L, D)` as three `(B, L, heads, H)`."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = mixed.view(*mixed.shape[:-1], 3, module.n_heads, module.head_dim).unbind(-3)
    return query, key, value


def read_arguments(module: Any) -> AttentionArguments:
    """Scaling and dropout of an MPT attention module."""
    return AttentionArguments(scaling=module.softmax_scale, dropout=module.attn_dropout_p)


def alibi(module: Any, value: torch.Tensor, layout: PackedLayout) -> Bias:
    """Per head, a slope times the key's position; transformers' model always adds it."""
    # transformers' own function, as its slopes are not Bloom's where heads are no power of two. Of two positions it
    # makes (-slope, 0), the difference of which is the slope.
    slopes = build_mpt_alibi_tensor(module.n_heads, 2, device=value.device).flatten(1)
    return linear_bias(slopes[:, 1] - slopes[:, 0], layout)


PATCH = Patch(
    model_types=("mpt",),
    backbone="MptModel",
    attention={"MptAttention": fused_qkv},
    output="out_proj",
    arguments=read_arguments,
    bias=alibi,
    makes_mask=True,  # MptModel turns the mask that it makes into bools
)
