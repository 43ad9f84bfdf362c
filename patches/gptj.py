"""GPT-J and CodeGen: rotary attention whose module calls its own attention function."""

from __future__ import annotations

from typing import Any

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import Patch


def read_arguments(module: Any) -> AttentionArguments:
    """Scaling and dropout of a GPT-J attention module."""
    return AttentionArguments(scaling=1.0 / float(module.scale_attn), dropout=module.attn_dropout.p)


PATCH = Patch(
    model_types=("gptj", "codegen"),
    functions={"GPTJAttention": "_attn", "CodeGenAttention": "_attn"},
    arguments=read_arguments,
)
