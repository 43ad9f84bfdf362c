"""Falcon: one fused projection with a few key/value heads, rotary embeddings or ALiBi."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.attention import AttentionArguments
from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import Patch
from trl_packfa.patches.llama import Embeddings


def rotary_qkv(
    module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`query_key_value` of `(B, L, D)` as three `(B, L, heads, H)`, query and key rotated."""
    # The module's own splitting, as Falcon has three ways to lay out the fused projection.
    query, key, value = module._split_heads(module.query_key_value(hidden_states))
    return *rotate(query, key, *position_embeddings), value


def read_arguments(module: Any) -> AttentionArguments:
    """Scaling of a Falcon attention module; with rotary embeddings transformers applies no dropout."""
    return AttentionArguments(scaling=module.inv_norm_factor)


PATCH = Patch(
    model_types=("falcon",),
    backbone="FalconModel",
    attention={"FalconAttention": rotary_qkv},
    output="dense",
    arguments=read_arguments,
    makes_mask=True,
    # ALiBi: the model rounds the bias to bfloat16 and adds it before scaling or after, by its attention: left to it.
    serves=lambda config: not config.alibi,
    otherwise=Patch(model_types=("falcon",), rebatch=True),
)
