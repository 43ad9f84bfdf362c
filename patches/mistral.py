"""Mistral: Llama's attention with one sliding window for every layer, which is in the config."""

from dataclasses import replace
from typing import Any

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import AttentionPatch, read_arguments
from trl_packfa.patches.llama import rotary_qkv


def config_window(module: Any) -> AttentionArguments:
    """Read the usual arguments, and the window from the module's config."""
    return replace(read_arguments(module), sliding_window=getattr(module.config, "sliding_window", None))


PATCH = AttentionPatch(
    model_types=("mistral",),
    backbone="MistralModel",
    attention={"MistralAttention": rotary_qkv},
    arguments=config_window,
)
