"""GPT-J and CodeGen: rotary attention; the module calls its own attention function before transformers 5.24."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from packaging.version import Version

from trl_packfa.attention import AttentionArguments
from trl_packfa.patches.base import FunctionPatch, InterfacePatch, Patch


def read_arguments(module: Any) -> AttentionArguments:
    """Read scaling and dropout from a GPT-J attention module."""
    return AttentionArguments(scaling=1.0 / float(module.scale_attn), dropout=module.attn_dropout.p)


_TYPES = ("gptj", "codegen")
PATCH: Patch = (
    InterfacePatch(model_types=_TYPES)  # uses transformers' attention interface
    if Version(version("transformers")) >= Version("5.24")
    else FunctionPatch(
        model_types=_TYPES, functions={"GPTJAttention": "_attn", "CodeGenAttention": "_attn"}, arguments=read_arguments
    )
)
