"""Boundaries of a call of a model without a patch, read in the two functions that transformers' registries call.

The mask function runs once for each kind of mask. It sees the mask of padding, the cache's lengths and, in its mask
rule, positions that restart. The attention function runs in every layer and sees the call's keywords. Neither sees
everything, so both must agree. A call that only one of them can see is refused.

Shape letters: B rows, L row length, N query heads, H head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidLayout
from ..layout import PackedLayout
from ..layout.call_checks import host_positions, refuse_beside_cache, refuse_restarts_under_padding
from ..layout.call_context import KEYWORD, is_empty_mask
from ..layout.from_call import layout_of
from ..runtime.per_document import FLASH_KEYS

_EXPLICIT = ("packed_layout", *FLASH_KEYS)
# Attribute of our masks: the mask of padding `(B, L)` that a mask was made of, or `None`. Callers' masks have none.
PADDING = "trl_packfa_padding"


def layout_of_attention(query: torch.Tensor, keys: int, mask: Any, kwargs: Mapping[str, Any]) -> PackedLayout | None:
    """Return the documents of an attention call, `None` if it is not packed.

    The query is `(B, N, L, H)`, and `keys` is the number of keys of a row, with those of a cache. The mask is the
    result of the mask function, and `kwargs` are the keywords that reached the attention function. Raise
    [`InvalidLayout`] if boundaries contradict each other, or came with padding or with a filled cache.
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
    call = getattr(mask, KEYWORD, None)
    seen = None if call is None else call.layout
    if told is None:
        raise InvalidLayout(
            "position_ids restart, but nothing about documents reached the attention.",
            why=["this model does not pass position_ids and cu_seq_lens_q on to its attention"],
            do="Use trl_packfa.patch(model), which passes boundaries to every layer.",
        )
    if seen is not None and seen.lengths != told.lengths:
        raise InvalidLayout(
            f"position_ids and the other boundaries disagree: lengths {list(seen.lengths)} and {list(told.lengths)}.",
            do="Send both from one collator, or only one of them.",
        )
    return told


class _LastCall(threading.local):
    """The layout of the call that this thread read last, shared by the layers of one forward."""

    _FOUND_BY = (*_EXPLICIT, "position_ids")

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, int]] | None = None
        self.shape: tuple[int, int] | None = None
        self.layout: PackedLayout | None = None

    def __call__(self, query: torch.Tensor, kwargs: Mapping[str, Any]) -> PackedLayout | None:
        call = {name: kwargs[name] for name in self._FOUND_BY if kwargs.get(name) is not None}
        shape = (query.shape[0], query.shape[2])
        # Compared by identity, which the kept reference makes safe, and by version, as a buffer may be written again.
        seen = [(name, value, _version(value)) for name, value in call.items()]
        if self.seen is None or self.shape != shape or not _same(self.seen, seen):
            layout = layout_of({**call, "inputs_embeds": query[:, 0]})  # (B, L, H)
            self.layout = layout if layout is None else layout.to(query.device)
            self.seen, self.shape = seen, shape
        elif self.layout is not None and self.layout.cu_seqlens.device != query.device:
            self.layout = self.layout.to(query.device)  # the model's layers lie on several devices
        return self.layout


def _version(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return -1 if value.is_inference() else value._version


def _same(before: list[tuple[str, Any, int]], now: list[tuple[str, Any, int]]) -> bool:
    pairs = zip(before, now, strict=False)
    # Tensors of inference mode count no versions (-1), so they are read every time.
    return len(before) == len(now) and all(n == m and a is b and v == w != -1 for (n, a, v), (m, b, w) in pairs)


_READ = _LastCall()


def _refuse_continued(shape: tuple[int, int], mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse documents beside a filled cache: each of them would see the cached tokens."""
    if shape[1] < 2:
        return
    call = dict(kwargs)
    if mask is not None and not hasattr(mask, PADDING):  # a caller's own mask decides what tokens see
        call.pop("position_ids", None)
    refuse_beside_cache({**call, "attention_mask": getattr(mask, PADDING, None)}, shape, "cache")


def _refuse_padded(shape: tuple[int, int], mask: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Refuse boundaries beside a mask with elements, which hides pads or is the caller's own."""
    explicit = {name: kwargs[name] for name in ("packed_layout", "cu_seq_lens_q") if kwargs.get(name) is not None}
    layout = layout_of({**explicit, "inputs_embeds": torch.empty((*shape, 0), device="cpu")}) if explicit else None
    if layout is not None and layout.num_documents > shape[0]:
        raise InvalidLayout(
            f"{next(iter(explicit))} came with an attention_mask that is not all ones, one for each token.",
            do="Drop the attention_mask: padding is a trailing document with labels -100.",
        )
    padding, positions = getattr(mask, PADDING, None), kwargs.get("position_ids")
    if padding is None or not isinstance(positions, torch.Tensor):
        return
    if (host := host_positions(positions, shape)) is not None:
        refuse_restarts_under_padding(host, padding)
