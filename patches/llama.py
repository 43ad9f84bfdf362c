"""Llama: three projections and rotary embeddings over whole heads."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.kernels.lora import project_together
from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import AttentionPatch, Heads

Embeddings = tuple[torch.Tensor, torch.Tensor]


def project_heads(module: Any, hidden_states: torch.Tensor) -> Heads:
    """Compute `q_proj`, `k_proj` and `v_proj` of `(B, L, D)`, each as `(B, L, heads, H)`."""
    return _project(module, hidden_states)[0]


def _project(module: Any, hidden_states: torch.Tensor) -> tuple[Heads, bool]:
    """Compute the heads, and tell whether only the caller holds them."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    # The three LoRA layers have the same input, so their products are computed together.
    (query, key, value), owned = project_together(hidden_states, module.q_proj, module.k_proj, module.v_proj)
    return (query.view(shape), key.view(shape), value.view(shape)), owned


def rotary_qkv(module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings) -> Heads:
    """Compute query, key and value `(B, L, heads, H)`, and rotate query and key."""
    (query, key, value), owned = _project(module, hidden_states)
    return *rotate(query, key, *position_embeddings, overwrites=owned), value


# EXAONE 3 is a Llama model with another config (transformers 5.24).
PATCH = AttentionPatch(
    model_types=("llama", "exaone"), backbone="LlamaModel", attention={"LlamaAttention": rotary_qkv}
)
