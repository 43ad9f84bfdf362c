"""Kinds of tokens that a packed call names.

A backbone that looks token types up in a table may get any. A backbone that builds its mask from them cannot be
packed, as packing uses no mask.
"""

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
    """Tell whether token types are looked up in a table, so that a packed row may have any."""
    if getattr(getattr(backbone, "config", None), "model_type", None) in _AMONG_WORDS:
        return True
    return any(isinstance(module, nn.Embedding) and "token_type" in name for name, module in backbone.named_modules())


def refuse_token_types(call: dict[str, Any], parameters: Iterable[str]) -> None:
    """Raise [`PackingError`] for token types of a prefix or an image, which this kind of backbone lets see each other.

    `parameters` are the names of those of the forward; the backbone ignores other arguments.
    """
    for name in set(parameters).intersection(_NAMES):
        types = call.get(name)
        # Tokenizers return all 0 for plain text, which does not change the mask.
        if isinstance(types, torch.Tensor) and bool((types != 0).any()):
            raise PackingError(
                f"{name} are not all 0 in a packed batch.",
                why=[
                    "this model's mask lets tokens of a prefix or an image attend to each other in both directions",
                    "packed attention uses no mask, and is causal inside each document",
                ],
                do=f"Drop {name}, or pass the documents as a padded batch.",
            )


def types_of_long_rows(backbone: Any, layout: PackedLayout) -> torch.Tensor | None:
    """Return token types `(B, L)` for a row longer than the backbone's own buffer of them, else `None`."""
    # The model (BigBird) would take the first L of its own buffer, which is as long as its table of positions. A
    # packed row may be longer: only its documents must fit the table.
    own = getattr(getattr(backbone, "embeddings", None), "token_type_ids", None)
    if not isinstance(own, torch.Tensor) or layout.local_shape[1] <= own.shape[-1]:
        return None
    return own.new_zeros(layout.local_shape)
