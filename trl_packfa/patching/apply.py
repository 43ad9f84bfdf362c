"""Applying a patch to one model instance.

This is the only code that sets attributes on models. It sets an instance's own `forward` (backbone, attention modules,
mixers, rotary embeddings, norms, LoRA layers), its `config` where transformers' registries are asked for attention or
masks, and one switch of 4-bit layers. It never changes classes, module globals or functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention import BackendChoice
from ..compile import CompiledLayer
from ..config.options import PatchOptions
from ..errors import NoBackend
from ..kernels.lm_head.labelled import LabelledHead
from ..kernels.lora import activated_overrides, adapted_layers, invocations_of, lora_overrides, require_in_packed_rows
from ..kernels.norms import RMSNormOverride, has_norm_kernel
from ..kernels.rotary import PlainRotation
from ..override import Override
from ..patches.base import (
    AttentionPatch,
    DocumentPatch,
    EncoderPatch,
    FunctionPatch,
    GroupsPatch,
    InterfacePatch,
    Patch,
    StackPatch,
)
from . import bitsandbytes
from .attention_interface import interface_config, mask_config, require_registered
from .cross_attention import ARGUMENTS, CrossAttentionOverride, cross_attention_of
from .encoders import EncoderOverride, LengthGroupsOverride, StackOverride
from .forwards import AttentionOverride, BackboneOverride, CausalLMOverride, CompositeOverride, DocumentOverride
from .inspect import class_names, forward_takes, inner_model, model_type
from .mixers import FunctionOverride, LayerOverride, MixerOverride
from .packed_attention import InterfaceOptions
from .parts import find_parts
from .rotary import RotaryOverride, depends_on_length
from .state import SLOT, Edit, PatchState, find_state
from .unpadding import SPANS, Sharing, SpanLossOverride, Unpadding

Value = TypeVar("Value")


def apply_patch(model: nn.Module, patch: Patch, options: PatchOptions | None = None) -> PatchState:
    """Patch this model instance in place, and return what was done. Every edit is prepared before any is made.

    Raise [`UnsupportedModel`] if the modules that the patch names are not there, or attend in both directions. Raise
    [`NoBackend`] if there is no backend of that name.
    """
    options = options or PatchOptions()
    require_registered()
    backends, parts, inner = BackendChoice(options.backend), find_parts(model, patch), inner_model(model)
    if isinstance(patch, DocumentPatch) and options.backend != "auto":
        raise NoBackend(
            f"attention backend '{options.backend}' cannot serve model type '{model_type(model)}'.",
            why=["its backbone runs document by document, with the model's own attention (level document)"],
            do="Pass backend='auto' (trainers: attention_backend='auto'), and choose the model's attn_implementation.",
        )
    state = PatchState(
        patch,
        options,
        backends,
        parts,
        adapted=adapted_layers(model),
        # Read from the `PeftModel` now: the modules below it, where adapters run, do not know the adapters' configs.
        invocations=invocations_of(model),
    )
    if options.unpad:
        sharing = _sharing(state) if options.share_prefixes else None
        by_row = ARGUMENTS if parts.takes_images and cross_attention_of(parts.backbone) else frozenset()
        state.unpadding = Unpadding(parts.stack, sharing, generates=not parts.padded_only, runs_by_row=by_row)
    for module in (parts.backbone, *parts.mixers.values()):
        require_in_packed_rows(module, by_document=isinstance(patch, DocumentPatch) or module is not parts.backbone)
    # Every refusal happens before the loop that sets the edits, so that a model is never patched in part.
    planned = _plan_attention(state) + _plan_masks(inner, state)
    planned += [(module, bitsandbytes.SWITCH, False) for module in bitsandbytes.convertible_modules(model)]
    overrides = _plan_outside(inner, state) + _plan_inside(state)
    if forward_takes(inner, SPANS[0]):
        before = next((override for override in reversed(overrides) if override.module is inner), None)
        overrides.append(SpanLossOverride(inner, state.unpadding, before))
    if not isinstance(patch, EncoderPatch):
        overrides += activated_overrides(model)
    planned += [override.as_edit() for override in overrides]
    setattr(parts.backbone, SLOT, state)
    for edit in planned:
        state.apply(*edit)
    return state


def _sharing(state: PatchState) -> Sharing:
    backbone, refusal = state.parts.backbone, state.needs_whole_documents
    if isinstance(state.patch, EncoderPatch):
        refusal = "its tokens see the tokens after them"
    elif refusal is None and any(map(depends_on_length, backbone.modules())):
        refusal = "the rotary embedding's frequencies depend on the length of a document"
    return Sharing(backbone, refusal)


def compile_layers(model: nn.Module, **options: Any) -> int:
    """Compile each layer of a patched model by itself, in place, and return the number of layers.

    Layers of one kind share their graphs, so compiling 32 layers takes as long as compiling one. `undo_patch` undoes
    it. `options` are the arguments of `torch.compile`.
    """
    state = find_state(model)
    assert state is not None
    modules = state.parts.backbone.named_modules()
    named = {name: module for name, module in modules if isinstance(module, GradientCheckpointingLayer)}
    # Not the layers inside of another one.
    layers = [module for name, module in named.items() if not any(name.startswith(f"{other}.") for other in named)]
    for layer in layers:
        state.apply(layer, CompiledLayer.SLOT, CompiledLayer(layer, options))
    return len(layers)


def _plan_attention(state: PatchState) -> list[Edit]:
    patch, backends = state.patch, state.backends
    planned: list[Edit] = []
    module: Any  # torch types `module.config` as a tensor or a module
    for module in state.parts.attention.values():
        if isinstance(patch, AttentionPatch):
            qkv = _of_class(patch.attention, module)
            qkv = qkv if state.options.fused_kernels else PlainRotation(qkv)
            planned.append(AttentionOverride(module, patch, qkv, backends).as_edit())
        elif isinstance(patch, FunctionPatch):
            function = _of_class(patch.functions, module)
            planned.append((module, function, FunctionOverride(module, function, patch.arguments, backends)))
        else:
            by_mask = state.parts.takes_images or isinstance(patch, StackPatch)
            window = patch.window if isinstance(patch, InterfacePatch) else None
            config = interface_config(module.config, InterfaceOptions(backends, window, by_mask))
            planned.append((module, "config", config))
    return planned


def _of_class(table: Mapping[str, Value], module: nn.Module) -> Value:
    return next(table[name] for name in class_names(module) if name in table)


def _plan_masks(inner: PreTrainedModel, state: PatchState) -> list[Edit]:
    """Return the edits of the models that make masks for packed attention.

    A backbone does so if it computes with its mask. Models between the outermost one and its text decoder may do so.
    """
    backbone: Any = state.parts.backbone
    planned: list[Edit] = []
    if state.patch.makes_mask:
        planned.append((backbone, "config", interface_config(backbone.config)))
    if state.unpadding is None or not state.parts.takes_images:
        return planned
    around = [m for m in inner.modules() if isinstance(m, PreTrainedModel) and m not in (inner, backbone)]
    found = [(m, mask_config(m.config)) for m in around if any(x is backbone for x in m.modules())]
    return planned + [(module, "config", config) for module, config in found if config is not None]


def _plan_outside(inner: PreTrainedModel, state: PatchState) -> list[Override]:
    """Return the overrides of the modules that find the boundaries: backbone and causal LM, or encoder and stack."""
    patch, unpadding, parts = state.patch, state.unpadding, state.parts
    backbone = parts.backbone
    if isinstance(patch, GroupsPatch):
        assert unpadding is not None
        return [LengthGroupsOverride(backbone, unpadding)]
    if isinstance(patch, StackPatch) and parts.stack is not backbone:
        assert unpadding is not None
        return [EncoderOverride(backbone, unpadding), StackOverride(parts.stack, unpadding)]
    overrides: list[Override] = [
        (DocumentOverride if isinstance(patch, DocumentPatch) else BackboneOverride)(backbone, state)
    ]
    # TRL's fused head would score every position of the padded batch, pads too.
    head = None if unpadding is None or inner is backbone else LabelledHead(inner)
    if head is not None:
        overrides.append(head)
    # Causal LMs of these levels pass further keywords on to the backbone, which finds `packed_layout` among them.
    # Others drop or refuse unknown keywords, so they get an override that reads `packed_layout` first.
    told = isinstance(patch, (AttentionPatch, InterfacePatch)) and not patch.run_by_document
    if parts.takes_images:
        overrides.append(CompositeOverride(inner, state, head))
    elif inner is not backbone and (patch.makes_mask or not told):
        overrides.append(CausalLMOverride(inner, state, head))
    return overrides


def _plan_inside(state: PatchState) -> list[Override]:
    """Return the overrides of modules inside the backbone, other than attention."""
    backbone, mixers = state.parts.backbone, state.parts.mixers
    if isinstance(state.patch, (DocumentPatch, GroupsPatch)):
        return []
    rotary = [module for module in backbone.modules() if depends_on_length(module)]
    overrides: list[Override] = [RotaryOverride(module) for module in rotary]
    if isinstance(state.patch, InterfacePatch):
        overrides += [MixerOverride(module, state.patch, state.native) for module in mixers.values()]
    overrides += [CrossAttentionOverride(module) for module in cross_attention_of(backbone)]
    fused = state.options.fused_kernels
    when_packed = lora_overrides(backbone, fused=fused, invocations=state.invocations)
    if fused:
        when_packed += [RMSNormOverride(module) for module in backbone.modules() if has_norm_kernel(module)]
    # These modules get neither the keyword nor the mask, so they read the context variable. With activation
    # checkpointing the backward pass recomputes a layer outside of the backbone's call: the layer sets the variable.
    if mixers or isinstance(state.patch, FunctionPatch) or state.patch.makes_mask or when_packed:
        layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
        overrides += [LayerOverride(layer) for layer in layers]
    return overrides + when_packed
