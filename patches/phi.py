"""Phi: biases in all layers, rotary embeddings over a part of each head, optional query/key layer norms."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import AttentionPatch, Heads
from trl_packfa.patches.llama import Embeddings, project_heads


def partial_rotary_qkv(module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings) -> Heads:
    """Compute query, key and value `(B, L, heads, H)`, and rotate the first `rotary_ndims` of query and key."""
    # The tables have `rotary_ndims` columns, so `rotate` does not change the rest of each head.
    query, key, value = project_heads(module, hidden_states)
    if module.qk_layernorm:
        query, key = module.q_layernorm(query), module.k_layernorm(key)
    return *rotate(query, key, *position_embeddings), value


PATCH = AttentionPatch(
    model_types=("phi",), backbone="PhiModel", attention={"PhiAttention": partial_rotary_qkv}, output="dense"
)
