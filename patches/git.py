"""GIT's text decoder: BERT's three projections under a causal mask, the output projection in a later module."""

from __future__ import annotations

from typing import Any

import torch

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import OWN_ATTENTION, AttentionPatch, Heads


def plain_qkv(module: Any, hidden_states: torch.Tensor, _: Any) -> Heads:
    """Compute query, key and value `(B, L, heads, H)` from `(B, L, D)`."""
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return (
        module.query(hidden_states).view(shape),
        module.key(hidden_states).view(shape),
        module.value(hidden_states).view(shape),
    )


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from a self-attention module like BERT's."""
    return AttentionArguments(scaling=module.attention_head_size**-0.5, dropout=module.dropout.p)


def unprojected(module: Any, attended: torch.Tensor, args: tuple[Any, ...]) -> tuple[torch.Tensor, None]:
    """Return the attended values without an output projection."""
    return attended, None


PATCH = AttentionPatch(
    model_types=("git",),
    not_by_name={"git": OWN_ATTENTION},
    backbone="GitModel",
    attention={"GitSelfAttention": plain_qkv},
    arguments=read_arguments,
    finish=unprojected,  # the next module, `GitSelfOutput`, has the output projection
)
