"""Qwen3: query and key get an RMSNorm per head before the rotation."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import AttentionPatch, Heads
from trl_packfa.patches.llama import Embeddings, project_heads


def normed_rotary_qkv(module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings) -> Heads:
    """Compute query, key and value `(B, L, heads, H)`, and normalize and rotate query and key."""
    query, key, value = project_heads(module, hidden_states)
    return *rotate(module.q_norm(query), module.k_norm(key), *position_embeddings), value


PATCH = AttentionPatch(model_types=("qwen3",), backbone="Qwen3Model", attention={"Qwen3Attention": normed_rotary_qkv})
