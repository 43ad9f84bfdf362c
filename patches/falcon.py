"""Falcon: one fused projection with a few key/value heads, rotary embeddings or ALiBi."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.attention import AttentionArguments
from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import AttentionPatch, DocumentPatch, Heads, Instead
from trl_packfa.patches.llama import Embeddings


def rotary_qkv(module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings) -> Heads:
    """Compute query, key and value `(B, L, heads, H)` from `(B, L, D)`, and rotate query and key."""
    # The module splits the projection, because Falcon has three layouts of it.
    query, key, value = module._split_heads(module.query_key_value(hidden_states))
    return *rotate(query, key, *position_embeddings), value


def read_arguments(module: Any) -> AttentionArguments:
    """Read the scaling from a Falcon attention module. With rotary embeddings transformers applies no dropout."""
    return AttentionArguments(scaling=module.inv_norm_factor)


def has_alibi(config: Any) -> bool:
    """Tell whether a Falcon model of this config has ALiBi in the place of rotary embeddings."""
    return config.alibi


PATCH = AttentionPatch(
    model_types=("falcon",),
    backbone="FalconModel",
    attention={"FalconAttention": rotary_qkv},
    output="dense",
    arguments=read_arguments,
    makes_mask=True,
    # Models with ALiBi round the bias to bfloat16 and add it before or after scaling, depending on their attention.
    # So they run their own attention, document by document.
    instead=Instead(has_alibi, DocumentPatch(model_types=("falcon",))),
)
