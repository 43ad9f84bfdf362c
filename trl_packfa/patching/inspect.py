"""Find what a patch names in a model: backbone, attention modules, windows, learned positions. Nothing is changed."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from textwrap import dedent
from typing import Any, NamedTuple, TypeVar

import torch
from peft import PeftModel
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModel
from ..parallel.zero3 import whole_shape
from ..patches.base import (
    AttentionPatch,
    DocumentPatch,
    EncoderPatch,
    FunctionPatch,
    GroupsPatch,
    InterfacePatch,
    ModulePatch,
    Patch,
    StackPatch,
)
from ..patches.registry import get_patch_for_type

Model = TypeVar("Model", bound=nn.Module)

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


def find_parts(model: nn.Module, patch: Patch) -> ModelParts:
    """Return the modules of a model that a patch works on.

    Raise [`UnsupportedModel`] if modules that the patch names are not there, attend in both directions, or get a
    window through their mask alone.
    """
    inner, backbone = inner_model(model), find_backbone(model, patch)
    takes_images, is_stack = backbone is text_decoder(model), isinstance(patch, StackPatch)
    attention = _find_attention(backbone, patch, by_mask=takes_images or is_stack)
    return ModelParts(
        backbone,
        attention,
        _windows_of(patch, backbone, attention),
        _find_by_class(backbone, patch.run_by_document),
        _find_stack(backbone, attention) if is_stack else backbone,
        takes_images,
        padded_only=isinstance(patch, EncoderPatch) or inner.get_output_embeddings() is None,
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


def model_type(model: nn.Module) -> str:
    """Return `config.model_type` of the outermost transformers model in `model`."""
    return model_config(model).model_type


def model_config(model: nn.Module) -> PreTrainedConfig:
    """Return the `config` of the outermost transformers model in `model`."""
    return inner_model(model).config


def own_config(module: nn.Module) -> Any:
    """Return the config object that a module itself holds, `None` if it has none.

    Some modules hold something else under this name: DeepSpeed's engine a dictionary, which has no attributes.
    """
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in `model`, or raise [`UnsupportedModel`] if there is none."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise UnsupportedModel(
            f"{type(model).__name__} holds no transformers model.",
            do="Pass a transformers causal LM, or a PEFT, compiled or wrapped one.",
        )
    return inner


def runnable(model: Model) -> Model | PreTrainedModel:
    """Return the part of a model that takes a batch by name: in sentence-transformers, the transformers model inside.

    Its own models are sequences of modules that take a dictionary of features.
    """
    if not isinstance(model, nn.Sequential):
        return model
    wrapped = (module for module in model.modules() if isinstance(module, (PeftModel, PreTrainedModel)))
    return next(wrapped, model)  # type: ignore[return-value]  # a `PeftModel` has the transformers model's attributes


def text_decoder(model: nn.Module) -> PreTrainedModel | None:
    """Return the text decoder of a model that also has encoders of images or sounds, `None` for any other model."""
    inner: Any = inner_model(model)
    if inner.config.get_text_config() is inner.config or inner.config.is_encoder_decoder:
        return None
    decoder = inner.get_decoder()
    is_apart = isinstance(decoder, PreTrainedModel) and decoder is not inner and decoder is not inner.base_model
    return decoder if is_apart else None


def get_patch(model: nn.Module) -> Patch:
    """Return the patch for a model, by the `config.model_type` of the outermost transformers model in it.

    Raise [`UnsupportedModel`] if there is none; the message names the most similar model types.
    """
    patch = get_patch_for_type(model_type(model))
    # One type may need two patches: Falcon has rotary models and ALiBi models.
    while patch.instead is not None and patch.instead.applies(model_config(model)):
        patch = patch.instead.patch
    return patch


def get_decoder_patch(decoder: nn.Module) -> Patch:
    """Return the patch for the text decoder of a model with images or sounds."""
    try:
        found = get_patch(decoder)
    except UnsupportedModel:
        found = InterfacePatch(model_types=(model_type(decoder),))
    return replace(found, backbone=type(decoder).__name__)


def known_ids(model: Any) -> int:
    """Return the size of the vocabulary that a model can read."""
    # The size of the embedding table: a larger id is an index error, whatever vocabulary the config states.
    return _rows(model.get_input_embeddings()) or model_config(model).get_text_config().vocab_size


def known_labels(model: Any) -> int:
    """Return the size of the vocabulary that a model can predict."""
    return _rows(model.get_output_embeddings()) or known_ids(model)


def _rows(layer: Any) -> int | None:
    """Return the number of rows of an embedding or LM head, from its weight; `None` for a layer of another kind."""
    weight = getattr(layer, "weight", None)
    # 4-bit weights are flat.
    shape = getattr(getattr(weight, "quant_state", None), "shape", None)
    shape = shape or (whole_shape(weight) if isinstance(weight, torch.Tensor) else ())
    # Not `out_features`, if there is a weight: PEFT swaps the features of a head that it ties to the embedding.
    return shape[0] if len(shape) == 2 else getattr(layer, "out_features", getattr(layer, "num_embeddings", None))


def forward_takes(module: nn.Module, name: str) -> bool:
    """Tell whether the forward of a module's class has an argument of this name."""
    return name in inspect.signature(type(module).forward).parameters


def find_backbone(model: nn.Module, patch: Patch) -> nn.Module:
    """Return the module that runs the decoder stack.

    Raise [`UnsupportedModel`] if the class that the patch names is missing, or there are several modules of it.
    """
    if patch.backbone is None:
        inner: Any = inner_model(model)
        base: Any = inner.base_model
        if base is inner:  # a causal LM whose prefix names something else (llama4_text)
            base = getattr(inner, "model", inner)
        # Some base models only wrap a decoder, and the causal LM calls the decoder itself (OPT, encoder-decoders).
        return base.decoder if hasattr(base, "decoder") and not hasattr(base, "encoder") else base
    found = [module for module in model.modules() if patch.backbone in class_names(module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"the patch for '{model_type(model)}' expects one {patch.backbone}, found {len(found)} in "
            f"{type(model).__name__}.",
            do=f"Patch the causal LM itself. {_WHOSE[patch.origin == 'trl_packfa']}",
        )
    return found[0]


def uses_interface(module: nn.Module) -> bool:
    """Tell whether a module computes attention through transformers' attention interface."""
    return hasattr(module, "config") and _reads_interface(type(module).forward)


@cache
def _reads_interface(forward: Callable[..., Any]) -> bool:
    """Tell whether a forward reads a global `AttentionInterface`, as transformers' `ALL_ATTENTION_FUNCTIONS` is."""
    function = inspect.unwrap(forward)  # transformers decorates forwards whose arguments were renamed
    if not inspect.isfunction(function):  # compiled to C: nothing can be read
        return False
    return any(isinstance(value, AttentionInterface) for value in inspect.getclosurevars(function).globals.values())


def is_causal(module: Any, asked: bool | None = None) -> bool:
    """Tell whether a module attends backwards only: as a call asks, by itself or, in a decoder, through its mask."""
    if asked is not None:
        return asked
    return getattr(module, "is_causal", True) is not False or bool(getattr(module, "is_decoder", False))


def attends_both_ways(model: nn.Module) -> bool:
    """Tell whether a model says that its attention sees later tokens, as that of an encoder does.

    A model may say nothing and ask for such a mask all the same; the check finds that.
    """
    inner = inner_model(model)
    if inner.config.is_encoder_decoder:
        return False
    own = [m for name, m in inner.named_modules() if uses_interface(m) and not _is_elsewhere(name, m)]
    if not own:  # some types are encoders unless their config says that they are decoders
        is_lm = type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        says = [getattr(inner.config, name, None) for name in ("is_decoder", "causal")]  # `causal` is XLM's
        return False in says and True not in says and not (is_lm and says[1] is None)
    return not any(map(is_causal, own))


@cache
def _keywords_passed(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of all keywords in the calls that a forward makes; none where its source is not at hand."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # compiled, or typed into a console
        return frozenset()
    calls = (node for node in ast.walk(ast.parse(dedent(source))) if isinstance(node, ast.Call))
    return frozenset(keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None)


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
        and not _is_elsewhere(name, module)
    }
    if not attention and not found:
        raise UnsupportedModel(
            f"{type(backbone).__name__} has no attention that uses transformers' attention interface.",
            do="Declare an AttentionPatch for it (documentation, 'Writing a patch').",
        )
    return attention


# Words in the names of modules that do not attend to the text's own tokens. Not `VisionText`: the text part of a model
# with vision in its name.
_ELSEWHERE = re.compile(
    r"cross|encoder_attn|vision(?!text)|visual|image|audio|speech|video|vq|embed_tokens_extend", re.IGNORECASE
)


def _is_elsewhere(name: str, module: nn.Module) -> bool:
    """Tell whether a module attends to an encoder, or is inside the encoder of another modality."""
    return bool(_ELSEWHERE.search(f"{name} {type(module).__name__}"))


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
    if isinstance(patch, InterfacePatch) and patch.window is not None:
        return tuple(patch.window(module) for module in attention.values())
    config: Any = backbone.config
    config = config.get_text_config()
    # Some configs carry a window that their model's code never reads: it makes no masks of windows.
    makes_masks = not vars(sys.modules[type(backbone).__module__]).keys().isdisjoint(_MAKERS)
    window = getattr(config, "sliding_window", None) if makes_masks else None
    chunk = getattr(config, "attention_chunk_size", None)
    # A window that only the mask applies would be lost without an error: a token would see its whole document.
    told = all("sliding_window" in _keywords_passed(type(module).forward) for module in attention.values())
    if chunk or (window and not told):
        raise UnsupportedModel(
            f"{type(backbone).__name__} limits attention to {chunk or window} tokens through its mask alone.",
            why=["packed attention uses no mask, so it would ignore the limit"],
            do="Declare an AttentionPatch for it (documentation, 'Writing a patch').",
        )
    return (window or None,) * len(attention)


def class_names(module: nn.Module) -> list[str]:
    """Return the names of the module's class and its bases: wrappers such as FSDP2 make subclasses at run time."""
    return [cls.__name__ for cls in type(module).__mro__]


# Tables of positions, not of distances between tokens.
_POSITIONS = re.compile(r"wpe|pos(ition)?s?_(emb|enc)|embed_positions", re.IGNORECASE)


def max_positions(backbone: nn.Module) -> int | None:
    """Return the number of positions in the smallest table of positions, `None` without a table.

    A position beyond it is an index error on a CPU. On CUDA it makes the device unusable for the process.
    """
    sizes = []
    for name, table in backbone.named_modules():
        own_name = name.rpartition(".")[2]
        elsewhere = _ELSEWHERE.search(name)
        if isinstance(table, nn.Embedding) and _POSITIONS.search(own_name) and "rel" not in own_name and not elsewhere:
            # Some rows are for no position: OPT and BART add an `offset` of 2, RoBERTa's positions begin after its
            # padding index (514 rows, padding index 1: 512 positions).
            before = getattr(table, "offset", 0) + (0 if table.padding_idx is None else table.padding_idx + 1)
            sizes.append(table.num_embeddings - before)
    # GPT-J, CodeGen and CTRL compute their tables once, up to the positions of the config.
    sizes += [
        len(table)
        for name, table in backbone.named_buffers()
        if table.dim() == 2 and table.is_floating_point() and _POSITIONS.search(name.rpartition(".")[2])
    ]
    config = own_config(backbone)
    if getattr(config, "model_type", "") == "mpt":  # a backbone may be no model of transformers
        sizes.append(config.max_seq_len)  # it adds a bias of this many keys
    return min(sizes, default=None)
