"""PEFT's activated LoRA (aLoRA) in packed calls, with one start per document.

PEFT finds the last invocation in a row, and the adapter changes every token from there on. A packed row needs one
start per document, but PEFT has one offset per row. So PEFT's layer runs without activated tokens; it computes the
base layer and the other adapters. Then the update is added here to the activated tokens of each document.

Shape letters: T packed tokens, S documents, P activated tokens, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import ALoraLinearVariant
from torch import nn

from ...compile import around_graphs, outside_of_graphs
from ...errors import TRAIN_PADDED, PackingError, UnsupportedModel
from ...layout import PackedLayout
from ...layout.call_context import current_call
from ...layout.from_call import layout_of
from ...override import NamedOverride, Override, forward_signature, forward_slot, override_in

Invocations = Mapping[str, tuple[int, ...]]


def invocations_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the invocation tokens of each activated adapter of a model, by the adapter's name.

    Raise [`UnsupportedModel`] if an adapter has no `PeftModel` around it, because PEFT would never activate it.
    """
    models = [module for module in model.modules() if isinstance(module, PeftModel)]
    configs: dict[str, Any] = {name: config for found in models for name, config in found.peft_config.items()}
    names = {name for layer in model.modules() for name in _activated(layer)}
    if names - configs.keys():
        raise UnsupportedModel(
            f"activated LoRA '{min(names - configs.keys())}' is on a model without a PeftModel around it.",
            why=["PEFT finds the invocation tokens in the PeftModel's forward; without it no token is activated"],
            do="Pass the PeftModel that get_peft_model returns.",
        )
    return {name: tuple(configs[name].alora_invocation_tokens) for name in names}


def activated_layers(module: nn.Module) -> list[nn.Module]:
    """List the LoRA layers in a module that have an activated adapter."""
    return [layer for layer in module.modules() if _activated(layer)]


def require_in_packed_rows(module: nn.Module, *, by_document: bool) -> None:
    """Raise [`UnsupportedModel`] for activated adapters inside a module that runs document by document."""
    if by_document and activated_layers(module):
        raise UnsupportedModel(
            f"activated LoRA is inside {type(module).__name__}, which runs document by document.",
            why=["the start of the adapter in each document is known for packed rows only"],
            do=f"Leave its layers out of target_modules, use plain LoRA, or {TRAIN_PADDED}.",
        )


def require_patched(module: nn.Module) -> None:
    """Raise [`PackingError`] for activated adapters that were added after the patch."""
    for layer in activated_layers(module):
        if not isinstance(override_in(layer, forward_slot(layer)), ActivatedLoraOverride):
            raise _added_late(_activated(layer)[0])


def _added_late(name: str) -> PackingError:
    return PackingError(
        f"activated LoRA '{name}' was added after the model was patched.",
        do="Call trl_packfa.patch(model) again after you add an adapter.",
    )


def _activated(layer: Any) -> list[str]:
    """List the activated adapters of a module. The list is empty if it is not a LoRA layer."""
    variants = layer.lora_variant if isinstance(layer, LoraLayer) else {}
    return [name for name, variant in variants.items() if isinstance(variant, ALoraLinearVariant)]


class ActivatedLoraOverride(Override):
    """A LoRA layer whose activated adapters change each document from its last invocation on."""

    def __init__(self, module: nn.Module, invocations: Invocations) -> None:
        super().__init__(module)
        self.invocations = invocations

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward."""
        layer: Any = self.module
        if not layer.lora_variant or layer.disable_adapters or layer.merged:
            return self.call_plain(x, *args, **kwargs)
        names = [name for name in _activated(layer) if name in layer.active_adapters]
        return self._run_activated(names, x, args, kwargs) if names else self.call_plain(x, *args, **kwargs)

    def call_plain(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a layer without active activated adapters."""
        return self.call_original(x, *args, **kwargs)

    # The activated tokens differ in every batch, so this runs outside of graphs.
    @outside_of_graphs
    def _run_activated(self, names: list[str], x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = current_call()
        if call.layout is None:
            return self.call_original(x, *args, **kwargs)
        late = [name for name in names if name not in self.invocations]
        if late:
            raise _added_late(late[0])
        layout, input_ids = call.layout, _require_whole(x, call.layout, call.input_ids)
        result = self.call_original(x, *args, **{**kwargs, "alora_offsets": None})
        layer: Any = self.module
        for name in names:
            lora_A, lora_B = layer.lora_A[name], layer.lora_B[name]
            invocation = self.invocations[name]
            if invocation not in call.memo:  # found once for all layers of a call
                call.memo[invocation] = activated_tokens(input_ids, layout, invocation)
            selected_P = call.memo[invocation].to(x.device)  # layers may lie on several devices
            x_PD = x.to(lora_A.weight.dtype).flatten(0, -2)[selected_P]
            update_PD = lora_B(lora_A(layer.lora_dropout[name](x_PD))) * layer.scaling[name]
            # In place, as in PEFT, so that the sum is rounded once.
            result.view(-1, result.shape[-1])[selected_P] += update_PD
        return result


def _require_whole(x: torch.Tensor, layout: PackedLayout, input_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the ids of a call if this layer sees all of its tokens, or raise [`PackingError`]."""
    if input_ids is None:
        raise PackingError(
            "activated LoRA needs input_ids, but a packed call came without input_ids.",
            why=["embeddings do not show the tokens that activate it"],
            do="Pass input_ids.",
        )
    if x.shape[:-1].numel() != layout.num_tokens:
        raise PackingError(
            f"activated LoRA is on a layer that sees {x.shape[:-1].numel()} of a batch's {layout.num_tokens} tokens.",
            why=["the layer, for example an expert, does not tell which tokens these are"],
            do="Leave such layers out of target_modules, or use plain LoRA.",
        )
    return input_ids


def activated_tokens(input_ids: torch.Tensor, layout: PackedLayout, invocation: tuple[int, ...]) -> torch.Tensor:
    """Return the indices `(P,)` of all tokens from the last invocation of their document on, in order.

    A document without a complete invocation has no activated tokens.
    """
    ids_T, documents_T = input_ids.flatten(), layout.document_ids().flatten().long()
    starts = ids_T.new_zeros(len(ids_T), dtype=torch.bool)
    count = len(ids_T) - len(invocation) + 1
    if count > 0:
        found = documents_T[:count] == documents_T[len(invocation) - 1 :]
        for offset, token in enumerate(invocation):
            found &= ids_T[offset : offset + count] == token
        starts[:count] = found
    numbers_T = torch.arange(len(ids_T), device=ids_T.device)
    last_S = numbers_T.new_full((layout.num_documents,), len(ids_T))
    last_S.scatter_reduce_(0, documents_T[starts], numbers_T[starts], "amax", include_self=False)
    return (numbers_T >= last_S[documents_T]).nonzero().flatten()


class ActivatedModelOverride(NamedOverride):
    """The forward of a `PeftModel` with activated adapters. Packed calls skip PEFT's offsets of rows.

    PEFT passes its offsets by hooks. With activation checkpointing it allows one set of hooks until a backward removes
    them. So packed calls make no hooks, and calls without gradients remove their hooks here.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__signature__ = forward_signature(module)

    @around_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the PeftModel's forward."""
        if self._is_packed(args, kwargs):
            peft_model: Any = self.module
            return peft_model.base_model(**self._named(args, kwargs))
        try:
            return self.call_original(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                for layer in self.module.modules():
                    handles = vars(layer).get("_peft_gradient_checkpointing_forward_hooks") or []
                    while handles:
                        handles.pop().remove()

    @outside_of_graphs
    def _is_packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return kwargs.get("adapter_names") is None and layout_of(self._named(args, kwargs)) is not None

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        of_peft, call = ("alora_offsets", "adapter_names", "task_ids"), self.named(args, kwargs)
        return {name: value for name, value in call.items() if name not in of_peft}


def activated_overrides(model: nn.Module) -> list[Override]:
    """Make an override for every `PeftModel` that contains layers with an activated adapter."""
    models = [module for module in model.modules() if isinstance(module, PeftModel) and activated_layers(module)]
    return [ActivatedModelOverride(module) for module in models]
