"""Qwen3: query and key are RMS-normalized per head before they are rotated."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.kernels.rotary import rotate
from trl_packfa.patches.base import Patch
from trl_packfa.patches.llama import Embeddings, project_heads


def normed_rotary_qkv(
    module: Any, hidden_states: torch.Tensor, position_embeddings: Embeddings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, L, heads, H)`, query and key normalized, then rotated."""
    query, key, value = project_heads(module, hidden_states)
    return *rotate(module.q_norm(query), module.k_norm(key), *position_embeddings), value


PATCH = Patch(model_types=("qwen3",), backbone="Qwen3Model", attention={"Qwen3Attention": normed_rotary_qkv})
