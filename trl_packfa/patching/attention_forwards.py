"""Edits that run attention modules packed: a new `forward`, a function of their own, or transformers' interface.

Each runs its original unless the call is packed.

Shape letters: B rows, L row length, T packed tokens (B * L), N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention import AttentionArguments, BackendChoice
from ..autocast import autocast_dtype
from ..compile import outside_of_graphs
from ..errors import PackingError
from ..kernels.rotary import PlainRotation
from ..layout import PackedLayout
from ..layout.call_context import KEYWORD, find_layout
from ..override import Override
from ..patches.base import QKV, AttentionPatch, FunctionPatch, Heads, StackPatch
from .attention_interface import interface_config
from .inspect import class_names
from .packed_attention import InterfaceOptions, attend_packed
from .state import Edit, PatchState

Value = TypeVar("Value")


def attention_edits(state: PatchState) -> list[Edit]:
    """Return the edits of the model's attention modules, as its patch declares them."""
    patch, backends, modules = state.patch, state.backends, state.parts.attention.values()
    edits: list[Edit] = []
    if isinstance(patch, AttentionPatch):
        for module in modules:
            qkv = _of_class(patch.attention, module)
            qkv = qkv if state.options.fused_kernels else PlainRotation(qkv)
            edits.append(AttentionOverride(module, patch, qkv, backends).as_edit())
        return edits
    if isinstance(patch, FunctionPatch):
        for module in modules:
            function = _of_class(patch.functions, module)
            edits.append((module, function, FunctionOverride(module, function, patch.arguments, backends)))
        return edits
    by_mask = state.parts.takes_images or isinstance(patch, StackPatch)
    options = InterfaceOptions(backends, patch.window, by_mask)
    own: Any  # torch types `module.config` as a tensor or a module
    for own in modules:
        edits.append((own, "config", interface_config(own.config, options)))
    return edits


def _of_class(table: Mapping[str, Value], module: nn.Module) -> Value:
    return next(table[name] for name in class_names(module) if name in table)


class AttentionOverride(Override):
    """Forward of one layer's attention on `(T, N, H)`: without transposes, mask or key/value expansion."""

    def __init__(self, module: nn.Module, patch: AttentionPatch, qkv: QKV, backends: BackendChoice) -> None:
        super().__init__(module)
        self.patch, self.qkv, self.backends = patch, qkv, backends

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the attention: return the output `(B, L, D)` and no weights, as no T x T matrix exists."""
        layout = find_layout((hidden_states, *args), kwargs)
        kwargs.pop(KEYWORD, None)
        if layout is None:
            return self.call_original(hidden_states, *args, **kwargs)
        position_embeddings = kwargs.get("position_embeddings", args[0] if args else None)
        query, key, value = (t.flatten(0, 1) for t in self.qkv(self.module, hidden_states, position_embeddings))
        # Under autocast the backends cast all three.
        if not query.dtype == key.dtype == value.dtype and autocast_dtype(query) is None:
            raise PackingError(
                f"the patch for {', '.join(self.patch.model_types[:3])} makes query, key and value of different "
                f"dtypes: {query.dtype}, {key.dtype}, {value.dtype}.",
                do="Cast query and key after the rotation, as the model's own code does.",
            )
        arguments = self.patch.arguments(self.module)
        if not self.module.training:
            arguments = replace(arguments, dropout=0.0)  # modules store the rate for training
        if self.patch.bias is None:
            out_TNH = self.backends.attend(query, key, value, layout, arguments)
        else:
            out_TNH = self._attend_with_bias((query, key, value), layout, arguments)
        attended = out_TNH.reshape(*hidden_states.shape[:-1], -1)  # (T, N, H) to (B, L, N * H)
        if self.patch.finish is not None:
            return self.patch.finish(self.module, attended, args)
        return getattr(self.module, self.patch.output)(attended), None

    # Outside of graphs, as the bias depends on this batch's documents.
    @outside_of_graphs
    def _attend_with_bias(self, qkv: Heads, layout: PackedLayout, arguments: AttentionArguments) -> torch.Tensor:
        assert self.patch.bias is not None
        if (gather := layout.sequence_gather) is not None:  # a bias is computed for whole documents, not for segments
            query, key, value = map(gather.gather, qkv)
            return gather.take_first(self._attend_with_bias((query, key, value), layout.full_sequences, arguments))
        arguments = replace(arguments, bias=self.patch.bias(self.module, qkv[2], layout))
        return self.backends.attend(*qkv, layout, arguments)


class FunctionOverride:
    """An attention module's own function of query, key, value and mask, which runs on packed tokens if a call is
    packed.

    Older architectures have such a function instead of the attention interface: `(query (B, N, L, H), key, value,
    mask)` to `(output (B, N, L, H), weights)`.
    """

    def __init__(
        self, module: nn.Module, name: str, arguments: Callable[[Any], AttentionArguments], backends: BackendChoice
    ) -> None:
        self.module, self.name, self.read_arguments, self.backends = module, name, arguments, backends

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module's attention function."""
        layout = find_layout((query, *args), kwargs)
        if layout is None:
            return getattr(type(self.module), self.name)(self.module, query, key, value, *args, **kwargs)
        arguments = self.read_arguments(self.module)
        if not self.module.training:
            arguments = replace(arguments, dropout=0.0)
        # These modules may rotate query and key in float32, but backends need one dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return attend_packed(self.backends, query, key, value, layout, arguments).transpose(1, 2), None
