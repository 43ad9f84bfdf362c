"""GPT-NeoX Japanese: rotary attention; the module calls its own attention function."""

from __future__ import annotations

from typing import Any

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import FunctionPatch


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from a GPT-NeoX Japanese attention module."""
    return AttentionArguments(scaling=1.0 / module.norm_factor, dropout=module.attention_dropout.p)


PATCH = FunctionPatch(
    model_types=("gpt_neox_japanese",), functions={"GPTNeoXJapaneseAttention": "_attn"}, arguments=read_arguments
)
