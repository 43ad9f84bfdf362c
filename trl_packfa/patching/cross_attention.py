"""Cross-attention of a text decoder to images (Mllama), in a padded batch that runs without its pads.

Each row attends to its own image states. So this attention runs on the padded rows, all other modules on true tokens.

Shape letters: B rows, L row length, T true tokens, D model dim, I image states of a row, K of them that are keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layout.call_context import KEYWORD, find_call, packed_call
from ..layout.padded_rows import PaddedRows
from ..override import NamedOverride

# transformers' names: image states `(B * I, K, D)`, and a mask `(B, 1, L, I * K)` of the keys that a token sees.
_STATES = "cross_attention_states"
BY_ROW = frozenset({_STATES, "cross_attention_mask"})
# 0 for tokens that see no image, `(B, 1, L, 1)`.
_SEES = "full_text_row_masked_out_mask"
ARGUMENTS = BY_ROW | {_SEES}


def cross_attention_of(backbone: nn.Module) -> list[nn.Module]:
    """Return the modules of a text decoder that attend to image states."""
    return [module for module in backbone.modules() if _attends(type(module))]


@cache
def _attends(cls: type[nn.Module]) -> bool:
    """Tell whether modules of a class attend to image states; layers and models hand these on."""
    around = issubclass(cls, (GradientCheckpointingLayer, PreTrainedModel))
    return not around and _STATES in inspect.signature(cls.forward).parameters


def take_call(call: Mapping[str, Any], rows: PaddedRows) -> dict[str, Any]:
    """Return the arguments of a decoder for the row without pads; what its cross-attention reads stays by row."""
    taken = rows.take_call({name: value for name, value in call.items() if name not in BY_ROW})
    sees = call.get(_SEES)
    if sees is not None:
        taken[_SEES] = rows.take(sees[:, 0])[:, None]
    return {**taken, **{name: call[name] for name in BY_ROW & call.keys()}}


def row_of_call(call: Mapping[str, Any], rows: PaddedRows, row: int) -> dict[str, Any]:
    """Return what the cross-attention of one row by itself, without its pads, reads."""
    part, own = slice(rows.starts[row], rows.starts[row] + rows.lengths[row]), {}
    for name in ("cross_attention_mask", _SEES):
        if call.get(name) is not None:
            own[name] = call[name][row : row + 1, :, part]
    if call.get(_STATES) is not None:
        own[_STATES] = call[_STATES].unflatten(0, (rows.shape[0], -1))[row]
    return own


class CrossAttentionOverride(NamedOverride):
    """Forward of cross-attention that puts the tokens of a row without pads back into their padded rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        rows = find_call(args, kwargs).rows
        if rows is None:
            return self.call_original(*args, **kwargs)
        call = self.named(args, kwargs)
        call.pop(KEYWORD, None)
        with packed_call(None):
            outputs, *others = self.call_original(**{**call, "hidden_states": rows.put_back(call["hidden_states"])})
        return rows.take(outputs), *others
