"""Applying a patch to one model instance.

Only this file and `state.py` set attributes on models: an instance's own `forward` (backbone, attention modules,
mixers, rotary embeddings, norms, LoRA layers), its `config` where transformers' registries are asked for attention or
masks, and one switch of 4-bit layers. Classes, module globals and functions never change.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention import BackendChoice
from ..compile import CompiledLayer
from ..config.options import PatchOptions
from ..errors import NoBackend
from ..kernels.lora import activated_overrides, adapted_layers, invocations_of, require_in_packed_rows
from ..patches.base import DocumentPatch, EncoderPatch, Patch
from .attention_forwards import attention_edits
from .attention_interface import mask_edits, require_registered
from .bitsandbytes import conversion_edits
from .cross_attention import ARGUMENTS, cross_attention_of
from .forwards import outer_overrides
from .inspect import Target
from .mixers import inner_overrides
from .parts import find_parts
from .rotary import depends_on_length
from .state import SLOT, PatchState, find_state, undo_patch
from .unpadding import Sharing, Unpadding


def apply_patch(target: Target, patch: Patch, options: PatchOptions | None = None) -> PatchState:
    """Patch this model instance in place, and return what was done. Every edit is prepared before any is made.

    An earlier patch has other options, lacks a new adapter, or was not exact. It is undone completely, so that edits
    never add up.

    Raise [`UnsupportedModel`] if the modules that the patch names are not there, or attend in both directions. Raise
    [`NoBackend`] if there is no backend of that name.
    """
    options = options or PatchOptions()
    require_registered()
    undo_patch(target.model)
    backends, parts, model = BackendChoice(options.backend), find_parts(target, patch), target.model
    if isinstance(patch, DocumentPatch) and options.backend != "auto":
        raise NoBackend(
            f"attention backend '{options.backend}' cannot serve model type '{target.type}'.",
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
    planned = [*attention_edits(state), *mask_edits(target.inner, state), *conversion_edits(model)]
    overrides = [*outer_overrides(target.inner, state), *inner_overrides(state)]
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
