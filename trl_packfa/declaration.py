"""What a patch says about an architecture: a declaration, no code that touches a model.

Shape letters: B rows, L row length, D model dim, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from .attention import AttentionArguments

# torch types every attribute of a module as a tensor or a module, so attention modules are `Any` here.
QKV: TypeAlias = Callable[[Any, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def read_arguments(module: Any) -> AttentionArguments:
    """The arguments as most transformers attention modules store them on themselves."""
    return AttentionArguments(
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None),
        dropout=float(getattr(module, "attention_dropout", 0.0)),
    )


@dataclass(frozen=True, kw_only=True)
class Patch:
    """How to make one family of architectures honour document boundaries.

    Args:
        model_types (`tuple[str, ...]`):
            The `config.model_type`s it serves.
        backbone (`str`, *optional*):
            Class name of the module that runs the decoder stack; transformers' own base model by default.
        attention (`Mapping[str, QKV]`, *optional*):
            Where the attention forward is rewritten, rung `attention`: for each attention class by name, the function
            `(module, hidden_states (B, L, D), position_embeddings)` to `query`, `key`, `value` of shape
            `(B, L, heads, H)`, rotated and normalized: everything before the attention itself. Without it, the patch
            goes through transformers' attention interface, rung `interface`.
        output (`str`, *optional*, defaults to `"o_proj"`):
            Name of the output projection of an attention module.
        arguments (`Callable`, *optional*):
            Reads the [`AttentionArguments`] off an attention module.
        rebatch (`bool`, *optional*, defaults to `False`):
            Run the whole backbone document by document, rung `rebatch`, for what mixes tokens in other ways.
        origin (`str`, *optional*, defaults to `"trl_packfa"`):
            The Python package that declares the patch, shown in logs and in duplicates' errors.
    """

    model_types: tuple[str, ...]
    backbone: str | None = None
    attention: Mapping[str, QKV] = field(default_factory=dict)
    output: str = "o_proj"
    arguments: Callable[[Any], AttentionArguments] = read_arguments
    rebatch: bool = False
    origin: str = "trl_packfa"

    @property
    def rung(self) -> str:
        """`attention`: its forward is rewritten; `interface`: it goes through transformers' attention interface;
        `rebatch`: the backbone runs document by document."""
        if self.rebatch:
            return "rebatch"
        return "attention" if self.attention else "interface"
