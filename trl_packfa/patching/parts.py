"""Find the modules that a patch names in a model: backbone, attention, windows, mixers. Nothing is changed."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from textwrap import dedent
from typing import Any, NamedTuple

from torch import nn

from ..errors import UnsupportedModel
from ..patches.base import (
    AttentionPatch,
    DocumentPatch,
    EncoderPatch,
    FunctionPatch,
    GroupsPatch,
    ModulePatch,
    Patch,
    StackPatch,
)
from .inspect import Target, class_names, is_causal, is_elsewhere, uses_interface

# What to do about a patch that does not fit, by whether it is ours.
_WHOSE = {True: "If transformers changed this architecture, please report it.", False: "Correct the patch's fields."}


class ModelParts(NamedTuple):
    """Modules of a model that a patch works on."""

    backbone: nn.Module  # the module that runs the decoder stack
    attention: dict[str, nn.Module]  # by name
    windows: tuple[int | None, ...]  # the sliding window of each attention module
    mixers: dict[str, nn.Module]  # other modules that mix tokens, or read their positions, by name
    stack: nn.Module  # the module whose padded calls run without pads: the backbone, or an encoder's layers
    # Whether the backbone is the text decoder of a model with images or sounds, which padded batches may bring.
    takes_images: bool
    padded_only: bool  # whether the model gets no packed rows: an encoder, a classifier, or no LM head


def find_parts(target: Target, patch: Patch) -> ModelParts:
    """Return the modules of a model that a patch works on.

    Raise [`UnsupportedModel`] if modules that the patch names are not there, attend in both directions, or get a
    window through their mask alone.
    """
    backbone = _find_backbone(target, patch)
    takes_images, is_stack = backbone is target.decoder, isinstance(patch, StackPatch)
    attention = _find_attention(backbone, patch, by_mask=takes_images or is_stack)
    return ModelParts(
        backbone,
        attention,
        _windows_of(patch, backbone, attention),
        _find_by_class(backbone, patch.run_by_document),
        _find_stack(backbone, attention) if is_stack else backbone,
        takes_images,
        padded_only=isinstance(patch, EncoderPatch) or target.inner.get_output_embeddings() is None,
    )


def _find_stack(backbone: nn.Module, attention: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that runs the layers: the one around the outermost list that holds the attention modules."""
    # For `encoder.layer.3.attention.self` the list is `encoder.layer`, and the stack is `encoder`.
    name = next(iter(attention))
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(backbone.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return backbone.get_submodule(".".join(parts[: end - 1]))
    return backbone


def _find_backbone(target: Target, patch: Patch) -> nn.Module:
    """Return the module that runs the decoder stack.

    Raise [`UnsupportedModel`] if the class that the patch names is missing, or there are several modules of it.
    """
    if patch.backbone is None:
        inner: Any = target.inner
        base: Any = inner.base_model
        if base is inner:  # a causal LM whose prefix names something else (llama4_text)
            base = getattr(inner, "model", inner)
        # Some base models only wrap a decoder, and the causal LM calls the decoder itself (OPT, encoder-decoders).
        return base.decoder if hasattr(base, "decoder") and not hasattr(base, "encoder") else base
    found = [module for module in target.model.modules() if patch.backbone in class_names(module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"the patch for '{target.type}' expects one {patch.backbone}, found {len(found)} in "
            f"{type(target.model).__name__}.",
            do=f"Patch the causal LM itself. {_WHOSE[patch.origin == 'trl_packfa']}",
        )
    return found[0]


def _find_attention(backbone: nn.Module, patch: Patch, *, by_mask: bool) -> dict[str, nn.Module]:
    """Return the attention modules by name, all of them causal unless the model's mask decides that (`by_mask`)."""
    if isinstance(patch, (DocumentPatch, GroupsPatch)):
        return {}
    if isinstance(patch, FunctionPatch):
        return _find_by_class(backbone, patch.functions)
    found = _find_rewritten(backbone, patch) if isinstance(patch, AttentionPatch) else _find_interface(backbone, patch)
    for name, module in found.items():
        if not by_mask and not is_causal(module):
            raise UnsupportedModel(
                f"{type(module).__name__} attends in both directions: is_causal=False in {name}.",
                why=["a packed row of an encoder would be one text to its positions and pooling"],
                do="For an encoder call patch(model, unpad=True): its padded batches run without their pads. Train an "
                "encoder-decoder model padded.",
            )
    return found


def _find_by_class(backbone: nn.Module, classes: Iterable[str]) -> dict[str, nn.Module]:
    names = set(classes)
    return {name: module for name, module in backbone.named_modules() if names.intersection(class_names(module))}


def _find_rewritten(backbone: nn.Module, patch: AttentionPatch) -> dict[str, nn.Module]:
    """Return the attention modules that the patch rewrites: one for each layer."""
    attention = _find_by_class(backbone, patch.attention)
    layers = backbone.config.num_hidden_layers  # type: ignore[union-attr]
    if len(attention) != layers:
        raise UnsupportedModel(
            f"{patch.backbone} has {layers} layers, but {len(attention)} attention modules of class "
            f"{' or '.join(patch.attention)}.",
            do=f"The patch was written for another model. {_WHOSE[patch.origin == 'trl_packfa']}",
        )
    return attention


def _find_interface(backbone: nn.Module, patch: Patch) -> dict[str, nn.Module]:
    """Return the modules that compute attention through transformers' interface: at least one."""
    # In a model with images only the text decoder: encoders attend in both directions, outside of the packed row.
    decoder: Any = getattr(backbone, "language_model", backbone)
    mixes = isinstance(patch, ModulePatch)
    found = _find_by_class(backbone, (*patch.mixers, *patch.masked_mixers) if mixes else ())
    # Modules that run document by document keep the model's own attention inside them.
    inside = [id(module) for mixer in found.values() for module in mixer.modules()]
    over_layers = _find_by_class(decoder, patch.over_layers if mixes else ())
    attention = {
        name: module
        for name, module in decoder.named_modules()
        if uses_interface(module)
        and id(module) not in inside
        and name not in over_layers
        and not is_elsewhere(name, module)
    }
    if not attention and not found:
        raise UnsupportedModel(
            f"{type(backbone).__name__} has no attention that uses transformers' attention interface.",
            do="Declare an AttentionPatch for it (documentation, 'Writing a patch').",
        )
    return attention


# transformers' functions that make masks of sliding windows.
_MAKERS = (
    "create_sliding_window_causal_mask", "create_bidirectional_sliding_window_mask", "create_masks_for_generate",
)  # fmt: skip


def _windows_of(patch: Patch, backbone: nn.Module, attention: dict[str, nn.Module]) -> tuple[int | None, ...]:
    """Return the sliding window of each attention module: the config's, if the model passes it to the interface.

    Raise [`UnsupportedModel`] if a window reaches the attention through the mask alone.
    """
    if isinstance(patch, DocumentPatch):
        return ()
    if isinstance(patch, (AttentionPatch, FunctionPatch)):
        return tuple(patch.arguments(module).sliding_window for module in attention.values())
    if patch.window is not None:
        return tuple(patch.window(module) for module in attention.values())
    config: Any = backbone.config
    config = config.get_text_config()
    # Some configs carry a window that their model's code never reads: it makes no masks of windows.
    makes_masks = not vars(sys.modules[type(backbone).__module__]).keys().isdisjoint(_MAKERS)
    window = getattr(config, "sliding_window", None) if makes_masks else None
    chunk = getattr(config, "attention_chunk_size", None)
    # A window that only the mask applies would be lost without an error: a token would see its whole document.
    passes_window = all("sliding_window" in _keywords_passed(type(module).forward) for module in attention.values())
    if chunk or (window and not passes_window):
        raise UnsupportedModel(
            f"{type(backbone).__name__} limits attention to {chunk or window} tokens through its mask alone.",
            why=["packed attention uses no mask, so it would ignore the limit"],
            do="Declare an AttentionPatch for it (documentation, 'Writing a patch').",
        )
    return (window or None,) * len(attention)


@cache
def _keywords_passed(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of all keywords in the calls that a forward makes; none where its source is not at hand."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # compiled, or typed into a console
        return frozenset()
    calls = (node for node in ast.walk(ast.parse(dedent(source))) if isinstance(node, ast.Call))
    return frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None)
