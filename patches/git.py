"""GIT's text decoder: BERT's three projections under a causal mask; the output projection comes later."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import Patch


def plain_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`query`, `key`, `value` of `(B, L, D)`, each as `(B, L, heads, H)`."""
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return (
        module.query(hidden_states).view(shape),
        module.key(hidden_states).view(shape),
        module.value(hidden_states).view(shape),
    )


def read_arguments(module: Any) -> AttentionArguments:
    """Scaling and dropout of a self-attention module of the BERT kind."""
    return AttentionArguments(scaling=module.attention_head_size**-0.5, dropout=module.dropout.p)


def unprojected(module: Any, attended: torch.Tensor, args: tuple[Any, ...]) -> tuple[torch.Tensor, None]:
    """The attended values as they are."""
    return attended, None


PATCH = Patch(
    model_types=("git",),
    backbone="GitModel",
    attention={"GitSelfAttention": plain_qkv},
    arguments=read_arguments,
    finish=unprojected,  # `GitSelfOutput` projects, after this module
)
