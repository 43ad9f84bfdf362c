"""Kinds of tokens that a packed call names: what a backbone looks up in a table is its own business; what it makes its
mask of cannot be packed, as packing does without the mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import PackingError
from ..layout import PackedLayout

_NAMES = ("token_type_ids", "mm_token_type_ids")
# Architectures that look token types up in their table of words; others have a table with the name.
_AMONG_WORDS = ("codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj")


def embeds_token_types(backbone: Any) -> bool:
    """Whether token types are looked up in a table: any may come in a packed row."""
    if getattr(getattr(backbone, "config", None), "model_type", None) in _AMONG_WORDS:
        return True
    return any(isinstance(module, nn.Embedding) and "token_type" in name for name, module in backbone.named_modules())


def refuse_token_types(call: dict[str, Any], parameters: Iterable[str]) -> None:
    """Tokens of a prefix or an image, which such a backbone lets see each other in both directions.

    Args:
        call (`dict[str, Any]`):
            Names and values of the call's arguments.
        parameters (`Iterable[str]`):
            Names that the backbone's forward declares; others it ignores.

    Raises:
        [`PackingError`]: naming the argument.
    """
    for name in set(parameters).intersection(_NAMES):
        types = call.get(name)
        # All 0 is what tokenizers return for plain text: it changes no mask.
        if isinstance(types, torch.Tensor) and bool((types != 0).any()):
            raise PackingError(
                f"{name} are not all 0 in a packed batch.",
                why=[
                    "this model's mask lets tokens of a prefix or an image attend to each other in both directions",
                    "packed attention has no mask, and is causal inside each document",
                ],
                do=f"Drop {name}, or pass the documents as a padded batch.",
            )


def types_of_long_rows(backbone: Any, layout: PackedLayout) -> torch.Tensor | None:
    """Token types `(B, L)` in the place of a backbone's own (BigBird's), which are as many as it has positions, where
    a row is longer."""
    # The model would take the first L of its own buffer, which is as long as its table of positions; a packed row may
    # be longer, as only its documents must fit the table.
    own = getattr(getattr(backbone, "embeddings", None), "token_type_ids", None)
    if not isinstance(own, torch.Tensor) or layout.row_length <= own.shape[-1]:
        return None
    return own.new_zeros(layout.rows, layout.row_length)
