"""GPT-Neo: unscaled attention in full and local layers; the module calls its own attention function."""

from __future__ import annotations

from typing import Any

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import FunctionPatch


def read_arguments(module: Any) -> AttentionArguments:
    """Read window and dropout from a GPT-Neo attention module."""
    # Local layers hide tokens by a buffer inside `_attn`, not by a mask.
    window = module.config.window_size if module.attention_type == "local" else None
    return AttentionArguments(scaling=1.0, sliding_window=window, dropout=module.attn_dropout.p)


PATCH = FunctionPatch(model_types=("gpt_neo",), functions={"GPTNeoSelfAttention": "_attn"}, arguments=read_arguments)
