"""XGLM: three projections, and sinusoidal positions in the embeddings."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import OWN_ATTENTION, AttentionPatch, Heads
from trl_packfa.patches.llama import project_heads


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from an attention module like BART's."""
    # The module itself scales the query. Here the query stays unscaled, and the backend scales the scores.
    return AttentionArguments(scaling=module.scaling, dropout=float(module.dropout))


def plain_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> Heads:
    """Compute `q_proj`, `k_proj` and `v_proj` of `(B, L, D)`, each as `(B, L, heads, H)`."""
    return project_heads(module, hidden_states)


PATCH = AttentionPatch(
    model_types=("xglm",),
    not_by_name={"xglm": OWN_ATTENTION},
    backbone="XGLMModel",
    attention={"XGLMAttention": plain_qkv},
    output="out_proj",
    arguments=read_arguments,
)
