"""Phi-3 and Phi-4: one fused QKV projection; transformers' rotary embeddings handle long rope and partial rotary."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import AttentionPatch, Heads
from trl_packfa.patches.llama import Embeddings
from trl_packfa.patches.mistral import config_window


def fused_qkv(module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings) -> Heads:
    """Compute query, key and value `(B, L, heads, H)` by `qkv_proj`, and rotate query and key."""
    num_heads, num_key_value_heads = module.config.num_attention_heads, module.num_key_value_heads
    # The heads lie side by side: N of the query, then K of the key, then K of the value.
    qkv = module.qkv_proj(hidden_states).view(*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = qkv.split([num_heads, num_key_value_heads, num_key_value_heads], dim=2)
    return *rotate(query, key, *position_embeddings), value


PATCH = AttentionPatch(
    model_types=("phi3",), backbone="Phi3Model", attention={"Phi3Attention": fused_qkv}, arguments=config_window
)
