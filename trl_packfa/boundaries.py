"""Which documents a forward call holds, read from the arguments that transformers and TRL send.

Three sources, in this order: our collator's `packed_layout` (nothing to compute), FlashAttention's `cu_seq_lens_*`,
`position_ids`. A batch without boundaries, a padded batch and a KV cache in use give `None`: they are not ours.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import InvalidLayout
from .layout import PackedLayout


def layout_of(call: dict[str, Any]) -> PackedLayout | None:
    """The documents of a forward call, `None` if it is not a packed batch.

    `call` maps argument names to values. An all-ones `attention_mask` and `use_cache=True` do not switch packing
    off, as they do in transformers.

    Raises:
        [`InvalidLayout`]: if the sources contradict each other or the batch.
    """
    embedded = call.get("inputs_embeds")
    tokens = call.get("input_ids") if embedded is None else embedded
    if tokens is None or any(_cache_in_use(call.get(name)) for name in _CACHES):
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    layout = call.get("packed_layout")
    if layout is None and call.get("cu_seq_lens_q") is not None:
        layout = _from_flash_kwargs(call, shape)
    if layout is not None:
        return _require_fit(layout, call, shape)
    return _from_position_ids(call, shape)


def _from_flash_kwargs(call: dict[str, Any], shape: tuple[int, int]) -> PackedLayout:
    """Layout from `cu_seq_lens_q`, which must equal `cu_seq_lens_k` and must not miss a boundary of `position_ids`."""
    offsets_q, offsets_k = call["cu_seq_lens_q"], call.get("cu_seq_lens_k")
    if offsets_k is not None and offsets_k is not offsets_q and not torch.equal(offsets_q, offsets_k.to(offsets_q)):
        raise InvalidLayout(f"cu_seq_lens_q {offsets_q.tolist()} and cu_seq_lens_k {offsets_k.tolist()} differ.")
    layout = PackedLayout.from_cu_seqlens(offsets_q, rows=1)
    position_ids = call.get("position_ids")
    if layout.num_tokens == shape[0] * shape[1]:
        layout = PackedLayout(layout.cu_seqlens, layout.lengths, rows=shape[0])
        if position_ids is not None and position_ids.shape == shape:
            _require_no_missing_boundary(layout, position_ids)
    return layout


def _require_no_missing_boundary(layout: PackedLayout, position_ids: torch.Tensor) -> None:
    by_position = PackedLayout.from_position_ids(position_ids)
    missing = set(by_position.cu_seqlens.tolist()) - set(layout.cu_seqlens.tolist())
    if missing:
        raise InvalidLayout(
            f"cu_seq_lens_q and position_ids disagree: positions restart at token {min(missing)}, "
            f"where cu_seq_lens_q {layout.cu_seqlens.tolist()} has no boundary.",
            do="Send both from one collator, or only one of them.",
        )


def _require_fit(layout: PackedLayout, call: dict[str, Any], shape: tuple[int, int]) -> PackedLayout:
    """Explicit boundaries must describe exactly this batch, and a mask must not say otherwise."""
    if layout.num_tokens != shape[0] * shape[1]:
        raise InvalidLayout(
            f"the boundaries describe {layout.num_tokens} tokens, the batch has {shape[0]} x {shape[1]}.",
            do="Send boundaries of the same batch.",
        )
    if layout.rows != shape[0]:
        layout = PackedLayout(layout.cu_seqlens, layout.lengths, rows=shape[0])
    mask = call.get("attention_mask")
    if mask is not None and not _all_ones(mask):
        raise InvalidLayout(
            "explicit boundaries (packed_layout or cu_seq_lens_q) came with an attention_mask that is not all ones.",
            do="Drop the attention_mask: padding is a trailing document with labels -100.",
        )
    return layout


def _from_position_ids(call: dict[str, Any], shape: tuple[int, int]) -> PackedLayout | None:
    """Layout from `position_ids` alone; one document per row, or padding, is no packed batch."""
    position_ids, mask = call.get("position_ids"), call.get("attention_mask")
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != shape[1]:
        return None
    if mask is not None and not _all_ones(mask):
        return None
    layout = PackedLayout.from_position_ids(position_ids.expand(shape))
    return None if layout.num_documents == shape[0] else layout


def _all_ones(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())


# What transformers calls a cache: of keys and values, of states, RWKV's list of states.
_CACHES = ("past_key_values", "cache_params", "state")


def _cache_in_use(cache: Any) -> bool:
    """Whether a call continues an earlier one; a cache that has no length counts as filled."""
    try:
        return cache is not None and cache.get_seq_length() > 0
    except (AttributeError, ValueError):
        return True
