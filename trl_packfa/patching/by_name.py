"""Attention and masks of a model that was loaded with `attn_implementation="packfa"` and has no patch.

Nothing of such a model is changed, so its attention finds the documents of a call, by the function by which a patched
backbone finds them. No registry sees what a model does besides attention (recurrent state, convolutions), so only
types whose patch changes attention alone are served. Any other type is refused at its first call that asks for a mask
or for attention, packed or not.

Shape letters: B rows, L row length, M keys of a row, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import BackendChoice
from ..compile import outside_of_graphs
from ..config.options import PatchOptions
from ..errors import InvalidLayout, PackingError, UnsupportedModel
from ..layout import PackedLayout
from ..layout.call_checks import host_positions, refuse_filled_cache
from ..layout.call_context import FLASH_KEYS, PackedCall, current_call, empty_mask, is_empty_mask
from ..layout.from_call import layout_of
from ..patches.base import OWN_ATTENTION, DocumentPatch, FunctionPatch, Heads, InterfacePatch, Patch
from ..patches.registry import find_patch_for_type
from .inspect import Target, inner_model, is_causal, model_type
from .mask_rules import sees_ahead, sees_back
from .packed_attention import InterfaceOptions, attend_by_options, eager_attention
from .parts import find_parts
from .rotary import LENGTH_DEPENDENT
from .state import PatchState

NAME = "packfa"
# The attention backends of all models that run by name.
CHOSEN = SimpleNamespace(backends=BackendChoice("auto"))
# The call that each thread read last, and its layout.
_LAST = threading.local()
# Attribute of our masks: the mask of padding `(B, L)`, or `None` without pads. Callers' own masks do not have it.
_PADDING = "trl_packfa_padding"
# Types with rotary embeddings whose results depend on more than differences of positions.
_POSITION_BOUND = ("beam", "hunyuan_v1_dense", "hunyuan_v1_moe")


def use_backend(name: str) -> None:
    """Choose the attention backend of all models that run by name; raise [`NoBackend`] if there is none of this name.

    The names are `"auto"`, the default, and those of `trl-packfa env`.
    """
    CHOSEN.backends = BackendChoice(name)


def runs_by_name(model: nn.Module) -> bool:
    """Tell whether a model, or its text part, was loaded with this `attn_implementation`."""
    config: Any = inner_model(model).config
    return NAME in (config._attn_implementation, config.get_text_config()._attn_implementation)


def named_state(model: nn.Module) -> PatchState:
    """Return the state that the check reads, for a model that runs by name; the model is not changed.

    Raise [`UnsupportedModel`] if its type is not served.
    """
    config: Any = inner_model(model).config
    window = named_options(config.get_text_config().model_type).window
    patch = InterfacePatch(model_types=(model_type(model),), window=window)
    options = PatchOptions(CHOSEN.backends.name, fused_kernels=False)
    return PatchState(patch, options, CHOSEN.backends, find_parts(Target.of(model), patch))


def named_options(model_type: str, *, passes_positions: bool = True) -> InterfaceOptions:
    """Return what attention of a type needs; raise [`UnsupportedModel`] if the type is not served."""
    patch = find_patch_for_type(model_type)
    why = "it was never measured" if patch is None else _why_not_served(model_type, patch)
    if why is None and not passes_positions:
        why = "it does not pass position_ids on to its attention: documents given by them would see each other"
    if patch is None or why is not None:
        raise UnsupportedModel(
            f"attn_implementation='{NAME}' does not serve model type '{model_type}'.",
            why=[str(why)],
            do="Load it with attn_implementation='sdpa' and pass it to trl_packfa.patch(model).",
        )
    return InterfaceOptions(CHOSEN.backends, patch.window)


def _why_not_served(model_type: str, patch: Patch) -> str | None:
    """Return why a type is not served; `None` if its patch changes only attention, through transformers' interface."""
    if isinstance(patch, DocumentPatch):
        return "its documents must run one by one: it mixes tokens in ways that no single module contains"
    if patch.level == "module":
        return "not only attention mixes its tokens: it has recurrent state, convolutions or attention of its own"
    if patch.run_by_document:
        return "not only its attention needs the boundaries: it counts positions itself, or has indexers"
    own = isinstance(patch, FunctionPatch) or patch.makes_mask or patch.bias
    if own or patch.origin != "trl_packfa":  # no measurement of ours is about a third party's patch
        return OWN_ATTENTION
    return patch.not_by_name.get(model_type)


# Outside of graphs, as the documents of a call are read on the host.
@outside_of_graphs
def attend_by_name(module: Any, heads: Heads, mask: Any, options: dict[str, Any]) -> torch.Tensor:
    """Attend from a query `(B, N, L, H)` to keys and values `(B, K, M, H)`, which gives `(B, L, N, H)`.

    Raise [`PackingError`] if the type is not served, or the call's boundaries cannot be honoured.
    """
    facts = InterfaceOptions(CHOSEN.backends)
    if is_causal(module, options.get("is_causal")):
        facts = named_options(module.config.model_type, passes_positions="position_ids" in options)
    layout = _layout_of(heads, mask, options)
    if layout is None:
        return attend_unpacked(facts, module, heads, mask, options)
    _require_positions(module.config, layout, options.get("position_ids"))
    return attend_by_options(facts, module, heads, layout, options)


def _layout_of(heads: Heads, mask: Any, options: Mapping[str, Any]) -> PackedLayout | None:
    """Return the documents of a call; `None` if it is not packed.

    Raise [`InvalidLayout`] if boundaries contradict each other, or came with padding or with a filled cache.
    """
    query, key, _ = heads
    names = ("packed_layout", *FLASH_KEYS, "position_ids")
    call = {name: options[name] for name in names if options.get(name) is not None}
    has_elements, padding = mask is not None and not is_empty_mask(mask), getattr(mask, _PADDING, None)
    if has_elements and not hasattr(mask, _PADDING):  # a caller's own mask decides what tokens see
        call.pop("position_ids", None)
    if query.shape[2] != key.shape[2]:  # keys of a cache
        refuse_filled_cache({**call, "attention_mask": padding}, (query.shape[0], query.shape[2]), "cache")
        return None
    call["inputs_embeds"] = query[:, 0]  # (B, L, H)
    if has_elements:
        layout_of({**call, "attention_mask": mask if padding is None else padding})
        return None
    layout = _read(call)
    if layout is None and mask is not None:
        raise InvalidLayout(
            "position_ids restart, but nothing about documents reached the attention.",
            do="Use trl_packfa.patch(model), which passes boundaries to every layer.",
        )
    # A caller's layout may lie on the host, and the model's layers on several devices.
    return None if layout is None else layout.to(query.device)


def _read(call: dict[str, Any]) -> PackedLayout | None:
    """Return [`layout_of`] the call, read once for all layers of a forward."""
    # By identity and by version, as a buffer may be written again.
    arguments = [(name, id(value), _version(value)) for name, value in call.items() if name != "inputs_embeds"]
    seen = [call["inputs_embeds"].shape[:2], *arguments]
    if getattr(_LAST, "seen", None) != seen:
        _LAST.layout = layout_of(call)
        _LAST.seen = seen
        _LAST.call = {**call, "inputs_embeds": None}  # so that no later value has the identity of one of these
    return _LAST.layout


def _version(value: Any) -> Any:
    """Return the number of writes to a tensor; in inference mode, where none is counted, what equals nothing else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return object() if value.is_inference() else value._version


def _require_positions(config: Any, layout: PackedLayout, positions: Any) -> None:
    """Raise [`PackingError`] for a packed call whose positions or document lengths would change a model's results.

    Positions must restart where a model's arithmetic depends on where they begin. A document must not be so long that
    the rotary frequencies of all others change with it.
    """
    # The parameters of the rotary embeddings: one for all layers, or one for each kind of layers.
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [kind for kind in parameters.values() if kind]
    scaled = [kind for kind in kinds if kind["rope_type"] in LENGTH_DEPENDENT]
    lengths = (kind.get("original_max_position_embeddings") or config.max_position_embeddings for kind in scaled)
    most = min(lengths, default=None)
    if most is not None and layout.max_seqlen > most:
        raise PackingError(
            f"a document of {layout.max_seqlen} tokens changes the rotary frequencies of all others in its batch: "
            f"beyond {most} tokens they depend on the longest document.",
            do=f"Cut documents to {most} tokens, or load the model with attn_implementation='sdpa' and pass it to "
            "trl_packfa.patch(model), which computes each document's own.",
        )
    if kinds and most is None and config.model_type not in _POSITION_BOUND:
        return
    host = host_positions(positions, (layout.rows, layout.row_length)) if positions is not None else None
    begins = None if host is None else host.flatten()[layout.cu_seqlens[:-1].cpu().long()]
    if begins is None or not bool((begins == begins[0]).all()):
        raise PackingError(
            f"boundaries came without position_ids that restart: a {config.model_type} model's results depend on "
            "where a document begins.",
            do="Send position_ids together with cu_seq_lens_q, each document's from 0.",
        )


@outside_of_graphs
def attend_unpacked(
    facts: InterfaceOptions, module: Any, heads: Heads, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attend in a call that is not packed: by the backends where it needs no mask, else as `sdpa`: `(B, L, N, H)`."""
    query, key, value = heads
    length = query.shape[2]
    if mask is None and length > 1 and is_causal(module, options.get("is_causal")):
        # Keys after the last query are the part of a static cache that is still empty.
        heads = query, key[:, :, :length], value[:, :, :length]
        return attend_by_options(facts, module, heads, _one_a_row(query.shape[0], length, query.device), options)
    if options.get("softcap") is None and options.get("s_aux") is None:
        return AttentionInterface()["sdpa"](module, *heads, mask, **options)[0]
    # `sdpa` lacks softcap and sinks. Eager attention has them, and adds its mask.
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_attention(module)(module, *heads, mask, **options)[0]


@lru_cache(maxsize=4)  # so that the layers of a forward share what backends derive from the layout
def _one_a_row(rows: int, length: int, device: torch.device) -> PackedLayout:
    return PackedLayout.from_lengths([length] * rows, rows=rows, device=device)


@outside_of_graphs
def mask_by_name(options: dict[str, Any]) -> torch.Tensor | None:
    """Make the mask for these keywords of transformers' mask interface: `sdpa`'s with pads or a cache, else none.

    Raise [`UnsupportedModel`] if the type is not served.
    """
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    if "allow_is_bidirectional_skip" in options:  # the mask of an encoder, or of attention to one
        return sdpa_mask(**options)
    named_options(options["config"].model_type)
    if current_call().masks_as_sdpa:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    length, padding = options["q_length"], options.get("attention_mask")
    padding = None if padding is None or bool(padding.all()) else padding
    # The offset is read only where the lengths agree: a static cache's offset is a tensor.
    is_continued = length != options["kv_length"] or int(options.get("q_offset", 0))
    if padding is None and not is_continued and not options.get("use_vmap", False):
        if length == 1 or options.get("allow_is_causal_skip", True):
            return None
        rule = options["mask_function"], (options["batch_size"], length), options["device"]
        if not sees_ahead(*rule):  # tokens of one image do
            # Positions restart where a token does not see the one before it. With a mask without elements attention
            # fails that does not get these positions.
            return None if sees_back(*rule) else empty_mask(PackedCall(), options["device"], dtype=torch.bool)
    mask = sdpa_mask(**options)
    if mask is not None:
        setattr(mask, _PADDING, padding)
    return mask
