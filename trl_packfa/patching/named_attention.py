"""Attention and masks of a model that was loaded with `attn_implementation="packfa"` and has no patch.

The mask function sees the mask of padding, the cache's lengths and, in its mask rule, positions that restart. The
attention function sees the call's keywords. Neither sees everything, so both must agree, and a call that only one of
them can see is refused.

A packed call uses no mask and runs by the backends. Other calls run as with `sdpa`, plus the softcap and sinks that
`sdpa` lacks; rows without pads run by the backends if the model asks for a window, softcap or sinks.

Shape letters: B rows, L row length, M keys of a row, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention.base import AttentionArguments
from ..attention.reference import dense_attention
from ..compile import outside_of_graphs
from ..errors import InvalidLayout, differing
from ..layout import PackedLayout
from ..layout.call_checks import refuse_filled_cache
from ..layout.call_context import BOUNDARIES, FLASH_KEYS, KEYWORD, PackedCall, current_call, empty_mask, is_empty_mask
from ..layout.from_call import layout_of
from ..patches.base import InterfacePatch
from .inspect import is_causal
from .mask_rules import sees_ahead, starts_in_rule
from .named_models import CHOSEN, require_positions, served_patch
from .packed_attention import READ, attend_packed, read_options, require_known

# Attribute of our masks: the mask of padding `(B, L)` that a mask was made of, or `None`. Callers' masks have none.
_PADDING = "trl_packfa_padding"


# Outside of graphs, as the documents of a call are read on the host.
@outside_of_graphs
def attend_by_name(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> torch.Tensor:
    """Attend from `query` `(B, N, L, H)` to `key` and `value` `(B, K, M, H)`, which gives `(B, L, N, H)`.

    Raise [`PackingError`] if the type is not served, or the call's boundaries cannot be honoured.
    """
    causal = options.get("is_causal")
    causal = is_causal(module) if causal is None else causal
    patch = served_patch(module.config.model_type) if causal else None
    layout = _layout_of(query, key.shape[2], attention_mask, options)
    arguments = read_options(query, options)
    if isinstance(patch, InterfacePatch) and patch.window is not None:
        arguments = replace(arguments, sliding_window=patch.window(module))
    if layout is None:
        rest = {name: option for name, option in options.items() if name not in (*BOUNDARIES, *READ)}
        return _unpacked(module, query, key, value, attention_mask, arguments, causal=causal, **rest)
    require_known(module, options)
    require_positions(module.config, layout, options.get("position_ids"))
    return attend_packed(CHOSEN.backends, query, key, value, layout, arguments)


def _layout_of(query: torch.Tensor, keys: int, mask: Any, kwargs: Mapping[str, Any]) -> PackedLayout | None:
    """Return the documents of a call with this many keys in a row, those of a cache too; `None` if it is not packed.

    Raise [`InvalidLayout`] if boundaries contradict each other, or came with padding or with a filled cache.
    """
    shape = (query.shape[0], query.shape[2])
    if shape[1] != keys:
        _refuse_continued(shape, mask, kwargs)
        return None
    if mask is not None and not is_empty_mask(mask):
        _refuse_padded(shape, mask, kwargs)
        return None
    told = _READ(query, kwargs)
    if mask is None:
        return told
    if told is None:
        raise InvalidLayout(
            "position_ids restart, but nothing about documents reached the attention.",
            why=["this model does not pass position_ids and cu_seq_lens_q on to its attention"],
            do="Use trl_packfa.patch(model), which passes boundaries to every layer.",
        )
    call = getattr(mask, KEYWORD, None)
    seen = None if call is None else call.layout
    if seen is not None and seen.lengths != told.lengths:
        raise InvalidLayout(
            f"position_ids and the other boundaries disagree: lengths {differing(seen.lengths, told.lengths)}.",
            do="Send both from one collator, or only one of them.",
        )
    return told


class _LastCall(threading.local):
    """The layout of the call that this thread read last, shared by the layers of one forward."""

    _FOUND_BY = ("packed_layout", *FLASH_KEYS, "position_ids")

    def __init__(self) -> None:
        self.call: dict[str, Any] = {}  # kept, so that no later value has the identity of one of these
        self.seen: list[Any] = []
        self.layout: PackedLayout | None = None

    def __call__(self, query: torch.Tensor, kwargs: Mapping[str, Any]) -> PackedLayout | None:
        call = {name: kwargs[name] for name in self._FOUND_BY if kwargs.get(name) is not None}
        # By identity and by version, as a buffer may be written again.
        seen = [query.shape[0], query.shape[2], *((name, id(x), _version(x)) for name, x in call.items())]
        if self.seen != seen:
            self.layout = layout_of({**call, "inputs_embeds": query[:, 0]})  # (B, L, H)
            self.call, self.seen = call, seen
        # A caller's layout may lie on the host, and the model's layers on several devices.
        return self.layout if self.layout is None else self.layout.to(query.device)


def _version(value: Any) -> Any:
    """Return the number of writes to a tensor; in inference mode, where none is counted, what equals nothing else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return object() if value.is_inference() else value._version


_READ = _LastCall()


def _refuse_continued(shape: tuple[int, int], mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse documents beside a filled cache: each of them would see the cached tokens."""
    call = dict(kwargs)
    if mask is not None and not hasattr(mask, _PADDING):  # a caller's own mask decides what tokens see
        call.pop("position_ids", None)
    refuse_filled_cache({**call, "attention_mask": getattr(mask, _PADDING, None)}, shape, "cache")


def _refuse_padded(shape: tuple[int, int], mask: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Refuse boundaries beside a mask with elements, which hides pads or is the caller's own."""
    call = {name: kwargs.get(name) for name in ("packed_layout", "cu_seq_lens_q", "position_ids")}
    padding = getattr(mask, _PADDING, None)
    call |= {"attention_mask": mask if padding is None else padding, "inputs_embeds": mask.new_empty((*shape, 0))}
    layout_of(call)


def _unpacked(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: AttentionArguments,
    *,
    causal: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend as `sdpa` does, with the softcap, sinks and windows that it lacks: `(B, L, N, H)`."""
    rows, length = query.shape[0], query.shape[2]
    whole = mask is None and causal and length > 1
    more = arguments.softcap is not None or arguments.sinks is not None
    windowed = whole and arguments.sliding_window is not None and length > arguments.sliding_window
    if not more and not windowed:
        sdpa = AttentionInterface()["sdpa"]
        kwargs.pop("is_causal", None)
        options = {"scaling": arguments.scaling, "dropout": arguments.dropout, "is_causal": causal}
        return sdpa(module, query, key, value, mask, **options, **kwargs)[0]
    if whole:
        # Keys after the last query are the part of a static cache that is still empty.
        key, value = key[:, :, :length], value[:, :, :length]
        layout = _one_a_row(rows, length, query.device)
        return attend_packed(CHOSEN.backends, query, key, value, layout, arguments)
    if mask is None:
        mask = torch.ones((1, 1, length, key.shape[2]), dtype=torch.bool, device=query.device)
    bias = None
    if mask.dtype != torch.bool:  # a caller's own mask, which is added to the scores
        mask, bias = torch.ones_like(mask, dtype=torch.bool), mask
    mask = mask | ~mask.any(dim=-1, keepdim=True)  # pads see no key; let them see all, or they would become NaN
    return dense_attention(query, key, value, mask, arguments, bias).transpose(1, 2)


@lru_cache(maxsize=4)  # so that the layers of a forward share what backends derive from the layout
def _one_a_row(rows: int, length: int, device: torch.device) -> PackedLayout:
    return PackedLayout.from_lengths([length] * rows, rows=rows, device=device)


def mask_by_name(options: dict[str, Any]) -> torch.Tensor | None:
    """Make the mask for these keywords of transformers' mask interface.

    A call without pads and cache gets no mask, one whose positions restart gets an empty mask, and any other gets
    `sdpa`'s. Raise [`PackingError`] if the type is not served.
    """
    return _make_mask(torch.compiler.is_compiling(), options)


@outside_of_graphs
def _make_mask(traced: bool, options: dict[str, Any]) -> torch.Tensor | None:
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    if "allow_is_bidirectional_skip" in options:  # the mask of an encoder, or of attention to one
        return sdpa_mask(**options)
    served_patch(options["config"].model_type)
    if current_call().masks_as_sdpa:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    length, padding = options["q_length"], options.get("attention_mask")
    may_skip, by_index = options.get("allow_is_causal_skip", True), not options.get("use_vmap", False)
    padded = padding is not None and not bool(padding.all())
    # The offset is read only where the lengths agree: a static cache's offset is a tensor.
    if padded or length != options["kv_length"] or int(options.get("q_offset", 0)) or not by_index:
        mask = sdpa_mask(**options)
        if mask is not None:
            setattr(mask, _PADDING, padding)
        return mask
    # In these cases the rule is a plain causal one, and there are no boundaries to read off it.
    if (may_skip and options.get("local_size") is None) or length == 1:
        return None
    rule, shape, device = options["mask_function"], (options["batch_size"], length), options["device"]
    if sees_ahead(rule, shape, device):  # tokens of one image
        return sdpa_mask(**options)
    layout = starts_in_rule(rule, shape, device)
    if layout is not None:
        return empty_mask(PackedCall(layout), torch.device(device), dtype=torch.bool)
    if not may_skip and padding is not None:
        # Under a mask of ones transformers ignores positions. The model that asks may be one around the decoder.
        served_patch(options["config"].model_type.removesuffix("_text"))
    # Some models always need a mask, and get one. In a graph transformers always asks for one, so that tells nothing.
    return None if may_skip or traced else sdpa_mask(**options)
