"""Applying a patch to one model instance and taking it back.

The only code that sets attributes on models: an instance's own `forward`, for the backbone, each attention module,
mixers, rotary embeddings, LoRA layers, and one switch of 4-bit layers. Never classes, module globals or functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from . import quantized
from .attention import BackendChoice, bridge
from .declaration import Patch
from .errors import NoBackend, UnsupportedModel
from .lora import adapted_layers, fused_overrides
from .mixers import FunctionOverride, LayerOverride, MixerOverride
from .overrides import (
    AttentionOverride,
    BackboneOverride,
    CausalLMOverride,
    Override,
    RebatchOverride,
    RotaryOverride,
    depends_on_length,
)

_STATE = "_trl_packfa"


@dataclass
class PatchState:
    """What was done to one model, kept on its backbone so that it travels with copies of the model."""

    patch: Patch
    backends: BackendChoice
    attention: dict[str, nn.Module]
    windows: tuple[int | None, ...]
    mixers: dict[str, nn.Module] = field(default_factory=dict)
    native: dict[type, tuple[str, ...]] = field(default_factory=dict)
    fused_lora: bool = False
    adapted: list[nn.Module] = field(default_factory=list)
    edits: list[tuple[nn.Module, str, Any]] = field(default_factory=list)


def find_state(model: nn.Module) -> PatchState | None:
    """The state of a patched model, `None` if it is not patched."""
    return next((vars(module)[_STATE] for module in model.modules() if _STATE in vars(module)), None)


def model_type(model: nn.Module) -> str:
    """`config.model_type` of the outermost transformers model in `model`.

    Raises:
        [`UnsupportedModel`]: if there is none.
    """
    return model_config(model).model_type


def model_config(model: nn.Module) -> PreTrainedConfig:
    """`config` of the outermost transformers model in `model`.

    Raises:
        [`UnsupportedModel`]: if there is none.
    """
    return _inner_model(model).config


def _inner_model(model: nn.Module) -> PreTrainedModel:
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise UnsupportedModel(
            f"{type(model).__name__} holds no transformers model.",
            do="Pass a transformers causal LM, or a PEFT, compiled or wrapped one.",
        )
    return inner


def apply_patch(model: nn.Module, patch: Patch, backend: str, *, fused_lora: bool = True) -> PatchState:
    """Patch this instance in place. Every edit is resolved before any is made.

    Raises:
        [`UnsupportedModel`]: if the modules that the patch names are not there, or attend in both directions.
        [`NoBackend`]: if there is no backend of that name.
    """
    backends = BackendChoice(backend)
    backbone = _find_backbone(model, patch)
    if patch.rebatch:
        _require_own_attention(patch, backend)
    attention = _find_attention(backbone, patch)
    mixers = _find_by_class(backbone, (*patch.mixers, *patch.masked_mixers, *patch.beside))
    windows, lora = _windows(patch, backbone, attention), adapted_layers(model)
    state = PatchState(patch, backends, attention, windows, mixers, fused_lora=fused_lora, adapted=lora)
    planned = _plan_attention(state)
    if patch.makes_mask:
        planned.append((backbone, "config", bridge.interface_config(_config(backbone), backends)))
    planned += [(module, quantized.SWITCH, False) for module in quantized.convertible_modules(model)]
    for override in (*_plan_outside(model, backbone, patch), *_plan_inside(backbone, state)):
        planned.append((override.module, _forward_slot(override.module), override))
    for module, slot, value in planned:
        state.edits.append((module, slot, vars(module).get(slot)))
        setattr(module, slot, value)
    setattr(backbone, _STATE, state)
    return state


def undo_patch(model: nn.Module) -> None:
    """Take back every edit, last first; a model that is not patched stays as it is."""
    state = find_state(model)
    if state is None:
        return
    for module, slot, before in reversed(state.edits):
        if before is None:
            delattr(module, slot)
        else:
            setattr(module, slot, before)
    for module in model.modules():
        vars(module).pop(_STATE, None)


def _require_own_attention(patch: Patch, backend: str) -> None:
    if backend != "auto":
        raise NoBackend(
            f"attention backend '{backend}' cannot serve {', '.join(patch.model_types[:3])}, ... (rung rebatch).",
            why=["the backbone runs document by document, with the model's own attention"],
            do="Pass attention_backend='auto', and choose the model's attn_implementation.",
        )


def _find_backbone(model: nn.Module, patch: Patch) -> nn.Module:
    if patch.backbone is None:
        inner: Any = _inner_model(model)
        base: Any = inner.base_model
        if base is inner:  # a causal LM whose prefix names something else (llama4_text)
            base = getattr(inner, "model", inner)
        # Causal LMs call past a base model that only wraps a decoder (OPT, those of encoder-decoders).
        return base.decoder if hasattr(base, "decoder") and not hasattr(base, "encoder") else base
    found = [module for module in model.modules() if patch.backbone in _class_names(module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"the patch for {', '.join(patch.model_types)} expects one {patch.backbone}, found {len(found)} in "
            f"{type(model).__name__}.",
            do="Patch the causal LM itself. If transformers changed this architecture, please report it.",
        )
    return found[0]


def _plan_attention(state: PatchState) -> list[tuple[nn.Module, str, Any]]:
    """The edits of the attention modules."""
    patch, backends, planned = state.patch, state.backends, []
    for module in state.attention.values():
        names = _class_names(module)
        if patch.attention:
            qkv = next(patch.attention[name] for name in names if name in patch.attention)
            override = AttentionOverride(module, _own_forward(module), patch=patch, qkv=qkv, backends=backends)
            planned.append((module, _forward_slot(module), override))
        elif not patch.functions.keys().isdisjoint(names):
            function = next(patch.functions[name] for name in names if name in patch.functions)
            planned.append((module, function, FunctionOverride(module, function, patch.arguments, backends)))
        else:
            planned.append((module, "config", bridge.interface_config(_config(module), backends, patch.window)))
    return planned


def _plan_outside(model: nn.Module, backbone: nn.Module, patch: Patch) -> list[Override]:
    """Who finds the boundaries: the backbone, and the causal LM around it where that may keep them to itself."""
    backbone_override = RebatchOverride if patch.rebatch else BackboneOverride
    overrides: list[Override] = [backbone_override(backbone, _own_forward(backbone), makes_mask=patch.makes_mask)]
    inner = _inner_model(model)
    told = patch.attention or (patch.rung == "interface" and not patch.beside and not patch.functions)
    if inner is not backbone and (patch.makes_mask or not told):
        overrides.append(CausalLMOverride(inner, _own_forward(inner)))
    return overrides


def _plan_inside(backbone: nn.Module, state: PatchState) -> list[Override]:
    """What needs the layout inside the backbone without being attention."""
    if state.patch.rebatch:
        return []
    rotary = [module for module in backbone.modules() if depends_on_length(module)]
    overrides: list[Override] = [RotaryOverride(module, _own_forward(module)) for module in rotary]
    overrides += [_mixer_override(module, state) for module in state.mixers.values()]
    fused = fused_overrides(backbone, _own_forward) if state.fused_lora else []
    if state.mixers or state.patch.functions or state.patch.makes_mask or fused:
        layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
        overrides += [LayerOverride(layer, _own_forward(layer)) for layer in layers]
    return overrides + fused


def _mixer_override(module: nn.Module, state: PatchState) -> Override:
    names, patch = set(_class_names(module)), state.patch
    beside = not names.isdisjoint(patch.beside)
    masked = not names.isdisjoint((*patch.beside, *patch.masked_mixers))
    config = getattr(module, "config", None)
    window: Any = getattr(module, "sliding_window", None) or getattr(config, "attention_window_size", None)
    return MixerOverride(
        module, _own_forward(module), native=state.native, masked=masked, beside=beside, window=window
    )


def _find_attention(backbone: nn.Module, patch: Patch) -> dict[str, nn.Module]:
    """The attention modules by name, all causal."""
    if patch.rebatch:
        return {}
    if patch.attention:
        return _find_rewritten(backbone, patch)
    if patch.functions:
        return _find_by_class(backbone, patch.functions)
    return _find_interface(backbone, patch)


def _find_by_class(backbone: nn.Module, classes: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of these classes by name."""
    names = set(classes)
    return {name: module for name, module in backbone.named_modules() if names.intersection(_class_names(module))}


def _find_rewritten(backbone: nn.Module, patch: Patch) -> dict[str, nn.Module]:
    """The attention modules that the patch rewrites: one per layer."""
    attention = _find_by_class(backbone, patch.attention)
    layers = backbone.config.num_hidden_layers  # type: ignore[union-attr]
    if len(attention) != layers:
        raise UnsupportedModel(
            f"{patch.backbone} has {layers} layers, but {len(attention)} attention modules of class "
            f"{' or '.join(patch.attention)}.",
            do="This architecture differs from the one that the patch was written for; please report it.",
        )
    return _require_causal(attention)


def _find_interface(backbone: nn.Module, patch: Patch) -> dict[str, nn.Module]:
    """The modules that compute attention through transformers' interface: at least one, all causal."""
    decoder: Any = getattr(backbone, "language_model", backbone)
    found = _find_by_class(backbone, (*patch.mixers, *patch.masked_mixers))
    inside = [id(module) for mixer in found.values() for module in mixer.modules()]
    attention = {
        name: module
        for name, module in decoder.named_modules()
        if bridge.uses_interface(module) and id(module) not in inside and not _is_elsewhere(name, module)
    }
    if not attention and not found:
        raise UnsupportedModel(
            f"{type(backbone).__name__} has no attention that uses transformers' attention interface.",
            do="Declare a trl_packfa.Patch that rewrites its attention (README, 'Writing a patch').",
        )
    return _require_causal(attention)


# Words in the names of modules that do not attend to the text's own tokens.
_ELSEWHERE = re.compile(
    r"cross|encoder_attn|vision|visual|image|audio|speech|video|vq|embed_tokens_extend", re.IGNORECASE
)


def _is_elsewhere(name: str, module: nn.Module) -> bool:
    """Attention to an encoder, which packed calls are refused with, or inside the encoder of another modality."""
    return bool(_ELSEWHERE.search(f"{name} {type(module).__name__}"))


def _windows(patch: Patch, backbone: nn.Module, attention: dict[str, nn.Module]) -> tuple[int | None, ...]:
    """The sliding window of each attention module; under the interface, where calls say it, the config's.

    Raises:
        [`UnsupportedModel`]: if a window reaches the attention in the mask alone, which packing does without.
    """
    if patch.rebatch:
        return ()
    if patch.attention or patch.functions:
        return tuple(patch.arguments(module).sliding_window for module in attention.values())
    if patch.window is not None:
        return tuple(patch.window(module) for module in attention.values())
    config: Any = backbone.config
    config = config.get_text_config()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if not bridge.masks_windows(backbone):
        window = None
    told = all(bridge.tells_window(module) for module in attention.values())
    if chunk or (window and not told):
        raise UnsupportedModel(
            f"{type(backbone).__name__} limits attention to {chunk or window} tokens through its mask alone.",
            why=["packed attention has no mask, and is not told of the limit"],
            do="Declare a trl_packfa.Patch that rewrites its attention (README, 'Writing a patch').",
        )
    return (window or None,) * len(attention)


def _require_causal(attention: dict[str, nn.Module]) -> dict[str, nn.Module]:
    for name, module in attention.items():
        if not bridge.is_causal(module):
            raise UnsupportedModel(
                f"{type(module).__name__} attends in both directions: is_causal=False in {name}.",
                why=["packed attention here is causal inside each document"],
                do="Set use_bidirectional_attention=False in the model's config, or train it padded.",
            )
    return attention


def _config(module: Any) -> PreTrainedConfig:
    return module.config


def _class_names(module: nn.Module) -> list[str]:
    """Names of the module's class and its bases: wrappers such as FSDP2 subclass on the fly."""
    return [cls.__name__ for cls in type(module).__mro__]


def _forward_slot(module: nn.Module) -> str:
    """The attribute that holds the real forward: accelerate's device hooks move it to `_old_forward`."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A forward set on the instance before us, `None` if it has its class's."""
    return vars(module).get(_forward_slot(module))
