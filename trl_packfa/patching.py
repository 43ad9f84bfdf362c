"""Applying a patch to one model instance and taking it back.

The only code that sets attributes on models: an instance's own `forward`, for the backbone, each attention module
and length-dependent rotary embeddings, and one switch of 4-bit layers. Classes, module globals and
`torch.nn.functional` are never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import quantized
from .attention import BackendChoice, bridge
from .declaration import Patch
from .errors import NoBackend, UnsupportedModel
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
    edits: list[tuple[nn.Module, str, Any]] = field(default_factory=list)


def find_state(model: nn.Module) -> PatchState | None:
    """The state of a patched model, `None` if it is not patched."""
    return next((vars(module)[_STATE] for module in model.modules() if _STATE in vars(module)), None)


def model_type(model: nn.Module) -> str:
    """`config.model_type` of the outermost transformers model in `model`.

    Raises:
        [`UnsupportedModel`]: if there is none.
    """
    return _inner_model(model).config.model_type


def _inner_model(model: nn.Module) -> PreTrainedModel:
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise UnsupportedModel(
            f"{type(model).__name__} holds no transformers model.",
            do="Pass a transformers causal LM, or a PEFT, compiled or wrapped one.",
        )
    return inner


def apply_patch(model: nn.Module, patch: Patch, backend: str) -> PatchState:
    """Patch this instance in place. Every edit is resolved before any is made.

    Raises:
        [`UnsupportedModel`]: if the modules that the patch names are not there, or attend in both directions.
        [`NoBackend`]: if there is no backend of that name.
    """
    backends = BackendChoice(backend)
    backbone = _find_backbone(model, patch)
    if patch.rebatch:
        _require_own_attention(patch, backend)
        attention: dict[str, nn.Module] = {}
    else:
        attention = _find_attention(backbone, patch) if patch.attention else _find_interface(backbone)
    state = PatchState(patch, backends, attention, _windows(patch, backbone, attention))
    backbone_override = RebatchOverride if patch.rebatch else BackboneOverride
    overrides: list[Override] = [backbone_override(backbone, _own_forward(backbone))]
    inner = _inner_model(model)
    if patch.rebatch and inner is not backbone:
        overrides.append(CausalLMOverride(inner, _own_forward(inner)))
    planned: list[tuple[nn.Module, str, Any]] = []
    for module in attention.values():
        if patch.attention:
            qkv = next(patch.attention[name] for name in _class_names(module) if name in patch.attention)
            overrides.append(AttentionOverride(module, _own_forward(module), patch=patch, qkv=qkv, backends=backends))
        else:
            config: Any = module.config
            planned.append((module, "config", bridge.interface_config(config, backends)))
    rotary = [module for module in backbone.modules() if depends_on_length(module) and not patch.rebatch]
    overrides += [RotaryOverride(module, _own_forward(module)) for module in rotary]
    planned += [(override.module, _forward_slot(override.module), override) for override in overrides]
    planned += [(module, quantized.SWITCH, False) for module in quantized.convertible_modules(model)]
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
        base: Any = _inner_model(model).base_model
        # The causal LMs of encoder-decoders keep their decoder in a wrapper that they call past.
        return base.decoder if type(base).__name__.endswith("DecoderWrapper") else base
    found = [module for module in model.modules() if patch.backbone in _class_names(module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"the patch for {', '.join(patch.model_types)} expects one {patch.backbone}, found {len(found)} in "
            f"{type(model).__name__}.",
            do="Patch the causal LM itself. If transformers changed this architecture, please report it.",
        )
    return found[0]


def _find_attention(backbone: nn.Module, patch: Patch) -> dict[str, nn.Module]:
    """The attention modules by name: one per layer, all causal."""
    attention = {
        name: module
        for name, module in backbone.named_modules()
        if not patch.attention.keys().isdisjoint(_class_names(module))
    }
    layers = backbone.config.num_hidden_layers  # type: ignore[union-attr]
    if len(attention) != layers:
        raise UnsupportedModel(
            f"{patch.backbone} has {layers} layers, but {len(attention)} attention modules of class "
            f"{' or '.join(patch.attention)}.",
            do="This architecture differs from the one that the patch was written for; please report it.",
        )
    return _require_causal(attention)


def _find_interface(backbone: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute attention through transformers' interface: at least one, all causal."""
    attention = {name: module for name, module in backbone.named_modules() if bridge.uses_interface(module)}
    if not attention:
        raise UnsupportedModel(
            f"{type(backbone).__name__} has no attention that uses transformers' attention interface.",
            do="Declare a trl_packfa.Patch that rewrites its attention (README, 'Writing a patch').",
        )
    return _require_causal(attention)


def _windows(patch: Patch, backbone: nn.Module, attention: dict[str, nn.Module]) -> tuple[int | None, ...]:
    """The sliding window of each attention module; under the interface, where calls say it, the config's.

    Raises:
        [`UnsupportedModel`]: if a window reaches the attention in the mask alone, which packing does without.
    """
    if patch.rebatch:
        return ()
    if patch.attention:
        return tuple(patch.arguments(module).sliding_window for module in attention.values())
    config: Any = backbone.config
    config = config.get_text_config()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
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
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(
                f"{type(module).__name__} attends in both directions: is_causal=False in {name}.",
                why=["packed attention here is causal inside each document"],
                do="Set use_bidirectional_attention=False in the model's config, or train it padded.",
            )
    return attention


def _class_names(module: nn.Module) -> list[str]:
    """Names of the module's class and its bases: wrappers such as FSDP2 subclass on the fly."""
    return [cls.__name__ for cls in type(module).__mro__]


def _forward_slot(module: nn.Module) -> str:
    """The attribute that holds the real forward: accelerate's device hooks move it to `_old_forward`."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A forward set on the instance before us, `None` if it has its class's."""
    return vars(module).get(_forward_slot(module))
