"""Gemma-3 text models: normalized query and key, five sliding layers to one full layer."""

from dataclasses import replace

from torch import nn

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import AttentionPatch, read_arguments
from trl_packfa.patches.qwen3 import normed_rotary_qkv


def without_softcap(module: nn.Module) -> AttentionArguments:
    """Read the usual arguments without the softcap."""
    # The module stores `attn_logit_softcapping`, but transformers never applies it.
    return replace(read_arguments(module), softcap=None)


PATCH = AttentionPatch(
    model_types=("gemma3_text",),
    backbone="Gemma3TextModel",
    attention={"Gemma3Attention": normed_rotary_qkv},
    arguments=without_softcap,
)
