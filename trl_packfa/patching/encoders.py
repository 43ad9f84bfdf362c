"""Padded batches of encoders: the stack of layers runs without pads, or the model in groups of rows of similar length.

Embeddings and pooling are made for padded batches, so they see the padded batch: BERT's pooler reads the first column
of each row, RoBERTa's positions count from its padding index.

Shape letters: B rows, L row length, T true tokens, G rows of a group, M their longest length, D model dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from ..compile import around_graphs, outside_of_graphs
from ..errors import PackingError
from ..layout import PackedLayout
from ..layout.call_context import KEYWORD, PackedCall, current_call, empty_mask, in_call, packed_call
from ..layout.from_call import layout_of
from ..layout.length_groups import group_by_length
from ..layout.padded_rows import PaddedRows, as_rows
from ..override import NamedOverride, Override
from ..patches.base import GroupsPatch, StackPatch
from .handed_masks import HandedMasks, handed_masks
from .inspect import own_config
from .state import PatchState
from .unpadding import Unpadding, refuse_packed

# Arguments that ask for the results of each layer, which the stack would return without pads.
_OF_EACH_LAYER = ("output_hidden_states", "output_attentions")


def encoder_overrides(state: PatchState) -> list[Override]:
    """Make the overrides of an encoder by its patch; none if its backbone is the stack, or it is no encoder."""
    patch, parts = state.patch, state.parts
    by_stack = isinstance(patch, StackPatch) and parts.stack is not parts.backbone
    if not by_stack and not isinstance(patch, GroupsPatch):
        return []
    unpadding = state.unpadding
    assert unpadding is not None, "encoders are patched with unpad=True only"
    if by_stack:
        return [EncoderOverride(parts.backbone, unpadding), StackOverride(parts.stack, unpadding)]
    return [LengthGroupsOverride(parts.backbone, unpadding)]


class _EncoderOverride(NamedOverride):
    def __init__(self, module: nn.Module, unpadding: Unpadding) -> None:
        super().__init__(module)
        self.unpadding = unpadding

    @outside_of_graphs
    def _read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; raise [`PackingError`] for packed rows and cross-attention."""
        call = self.named(args, kwargs)
        layout = layout_of(call)
        if (current_call().layout if layout is None else layout) is not None:
            refuse_packed(self.module)
        if call.get("encoder_hidden_states") is not None:
            raise PackingError(
                "cross-attention cannot run without pads: each row attends to its own encoder states.",
                do="Patch the model with unpad=False.",
            )
        call.pop("packed_layout", None)
        return call

    def _asks_for_layers(self, call: Mapping[str, Any]) -> bool:
        config = own_config(self.module)
        requested = (getattr(config, name, None) if call.get(name) is None else call[name] for name in _OF_EACH_LAYER)
        return any(requested)


class EncoderOverride(_EncoderOverride):
    """Forward of an encoder whose stack of layers runs without pads: the masks that it makes are only noted."""

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the encoder's forward."""
        call = self._read_call(args, kwargs)
        if not self.unpadding.is_on or self._asks_for_layers(call):
            return self.call_original(**call)
        with packed_call(None, notes_masks=True):
            return self.call_original(**call)


class StackOverride(_EncoderOverride):
    """Forward of an encoder's stack of layers, on one row of the true tokens."""

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stack's forward."""
        call = self.named(args, kwargs)
        name, masks = self._find_masks(call)
        if masks is None:
            return self.call_original(*args, **kwargs)
        rows, taken, packed = self._taken(call, name, masks)
        with in_call(packed):
            outputs = self.call_original(**taken)
        if rows is None:
            return outputs
        return self.unpadding.put_back(self.call_original, {**call, name: masks.handed()}, rows, outputs)

    @outside_of_graphs
    def _find_masks(self, call: dict[str, Any]) -> tuple[str, HandedMasks | None]:
        """Return the name of the argument with the masks that the encoder has noted, and these masks."""
        found = ((name, handed_masks(value)) for name, value in call.items())
        return next(((name, masks) for name, masks in found if masks is not None), ("", None))

    @outside_of_graphs
    def _taken(
        self, call: dict[str, Any], name: str, masks: HandedMasks
    ) -> tuple[PaddedRows | None, dict[str, Any], PackedCall]:
        states, logits = call[self.names[0]], current_call().router_logits
        rows = self.unpadding.rows_of({"inputs_embeds": states, "attention_mask": masks.padding}, {})
        if rows is None:
            return None, {**call, name: masks.make()}, PackedCall(router_logits=logits)
        layout: PackedLayout = rows.layout(states.device)
        if masks.sees_both_directions(rows):
            layout = layout.in_both_directions()
        packed = PackedCall(layout, router_logits=logits)
        taken = tree_map(partial(_take, rows=rows), call)
        taken[name] = empty_mask(packed, states.device)
        return rows, taken | ({KEYWORD: packed} if self.takes_any else {}), packed


def _take(value: Any, rows: PaddedRows) -> Any:
    """Return the true tokens of an argument `(B, L, ...)` or `(1, L, ...)`."""
    own = {"value": value}
    as_rows(own, rows.shape)
    return rows.take_call(own)["value"]


class LengthGroupsOverride(_EncoderOverride):
    """Forward of an encoder that runs rows of similar length together, with its own masks and fewer pads."""

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the encoder's forward."""
        call = self._read_call(args, kwargs)
        rows = None if self._asks_for_layers(call) else self._find_rows(call)
        if rows is None:
            return self.call_original(**call)
        return self._run_in_groups(call, rows)

    @outside_of_graphs
    def _find_rows(self, call: dict[str, Any]) -> PaddedRows | None:
        """Return the rows of a call that runs in groups; `None` if it runs as it is."""
        if any(name.startswith("decoder_") and value is not None for name, value in call.items()):
            self.unpadding.log_once("trl-packfa: calls of %s that bring inputs of its decoder run with their pads.")
            return None  # its length is another one, or equal by chance
        rows = self.unpadding.rows_of(call, call)
        # Without the pads before it, a token would have another position.
        return None if rows is None or any(rows.starts) else rows

    @outside_of_graphs
    def _run_in_groups(self, call: dict[str, Any], rows: PaddedRows) -> Any:
        device = next(value.device for value in call.values() if isinstance(value, torch.Tensor))
        lengths = tuple(max(length, 1) for length in rows.lengths)  # a row of pads alone keeps one of them
        groups = group_by_length(lengths, device)
        widths = [lengths[group[0]] for group in groups]
        outputs = []
        for group, width in zip(groups, widths, strict=True):
            index = torch.tensor(group, device=device)
            outputs.append(self.call_original(**{key: _cut(v, index, width, rows) for key, v in call.items()}))
        computed = sum(len(group) * width for group, width in zip(groups, widths, strict=True))
        self.unpadding.pads -= computed - rows.num_tokens  # these pads were computed
        order = torch.tensor([i for group in groups for i in group], device=device)
        merged = tree_map(partial(_merged, order, widths, rows), *outputs)
        self.unpadding.note(self.call_original, call, rows, merged)
        return merged


def _cut(value: Any, index: torch.Tensor, longest: int, rows: PaddedRows) -> Any:
    """Return a group's rows of an argument `(B, ...)`, `(B, L, ...)` or `(1, L, ...)`, without their last pads."""
    if not isinstance(value, torch.Tensor) or value.dim() < 1:
        return value
    count, length = rows.shape
    if value.shape[0] == count and (count > 1 or value.dim() > 1):
        value = value.index_select(0, index)
    elif value.dim() < 2 or value.shape[0] != 1:
        return value
    return value[:, :longest] if value.dim() > 1 and value.shape[1] == length else value


def _merged(order: torch.Tensor, widths: Sequence[int], rows: PaddedRows, *outputs: Any) -> torch.Tensor | None:
    """Return an output of all groups as that of the padded batch; `None` for a cache, which training does not read."""
    if outputs[0] is None or isinstance(outputs[0], Cache):
        return None
    if not isinstance(outputs[0], torch.Tensor):
        raise PackingError(
            f"unpad=True cannot return a value of type {type(outputs[0]).__name__}, which is in this model's output.",
            why=["rows of similar length run together, and only tensors of several calls can be joined"],
            do="Patch the model with unpad=False.",
        )
    if not outputs[0].dim():
        raise PackingError(
            "unpad=True cannot join the single numbers that this model returns, such as a loss.",
            why=["rows of similar length run together, and how a number of each group counts is not known"],
            do="Compute the loss from the logits, or patch the model with unpad=False.",
        )
    parts, after = list(outputs), (0, 0) * (outputs[0].dim() - 2)
    if all(part.dim() > 1 and part.shape[1] == width for part, width in zip(parts, widths, strict=True)):
        parts = [nn.functional.pad(part, (*after, 0, rows.shape[1] - part.shape[1])) for part in parts]
    return torch.cat(parts).index_select(0, order.argsort())
