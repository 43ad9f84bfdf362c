"""The masks that a model with images makes and hands to its text decoder.

Some models make the decoder's masks themselves, because tokens of an image see each other in both directions. Such a
mask of L x L is not needed where the decoder runs without pads. So each is only noted when the model makes it: the
mask of padding travels in its place, and the decoder makes the mask if it runs the call as it is.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..compile import outside_of_graphs
from ..errors import PackingError
from ..layout.bidirectional import BidirectionalSpans, Span
from ..layout.call_context import is_empty_mask
from ..layout.padded_rows import PaddedRows, rows_of
from .mask_rules import RowSpans, spans_in_rule

# Attribute of the mask of padding that travels in the place of masks.
_HANDED = "_trl_packfa_handed"
# The kinds of layers by which transformers names a decoder's masks.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, eq=False)
class NotedMask:
    """A mask that was not made."""

    make: Callable[[], Any]  # in the form of the model's own attention
    padding: torch.Tensor  # the mask of padding, `(B, L)`
    spans: RowSpans  # tokens that see each other in both directions


def note_mask(make: Callable[[], Any], options: Mapping[str, Any]) -> Any:
    """Return the mask of padding with a note of the mask that it stands for; without padding make the mask.

    `options` are the keywords of transformers' mask interface. Raise [`PackingError`] if some images of a row see each
    other, and others do not. Raise [`InvalidLayout`] if a row has pads among its tokens.
    """
    padding, lengths = options.get("attention_mask"), (options.get("q_length"), options.get("kv_length"))
    if not isinstance(padding, torch.Tensor) or padding.dim() != 2 or set(lengths) != {padding.shape[1]}:
        return make()
    # transformers lets attention skip the mask only if it is plainly causal.
    spans = RowSpans(((),) * padding.shape[0])
    if not options.get("allow_is_causal_skip", False):
        rows_of(padding)  # refuses a hole in words about the hole, which would cut a span in two
        spans = spans_in_rule(options["mask_function"], padding, by_index=not options.get("use_vmap", False))
    return _attach(padding, NotedMask(make, padding, spans))


def _attach(padding: torch.Tensor, noted: NotedMask | HandedMasks) -> torch.Tensor:
    mask = padding.detach().clone()  # the model may send one tensor of padding for several masks
    setattr(mask, _HANDED, noted)
    return mask


class HandedMasks:
    """The masks that a decoder was handed, by the kind of layer; one for all kinds has the name `None`."""

    def __init__(self, masks: Mapping[str | None, Any], padding: torch.Tensor) -> None:
        self.masks, self.padding = masks, padding

    def make(self, cut: Callable[[Any], Any] = lambda mask: mask) -> Any:
        """Make the masks and `cut` each; return them in the form in which they were handed over."""
        made = {kind: cut(mask.make() if isinstance(mask, NotedMask) else mask) for kind, mask in self.masks.items()}
        return made[None] if None in made else made

    def of_row(self, rows: PaddedRows, row: int) -> Any:
        """Return the masks of one row by itself, without its pads; raise [`PackingError`] if a mask has no rows."""
        part = slice(rows.starts[row], rows.starts[row] + rows.lengths[row])
        return self.make(partial(_cut, row=row, part=part))

    def handed(self) -> Any:
        """Return the mask of padding that stands for all masks."""
        return _attach(self.padding, self)

    def sees_both_directions(self, rows: PaddedRows) -> bool:
        """Tell whether tokens see their whole row, as in an encoder, or the tokens before them only.

        Raise [`PackingError`] if some tokens see later tokens and others do not.
        """
        found = {mask.spans.rows for mask in self.masks.values() if isinstance(mask, NotedMask)}
        if not any(map(any, found)):
            return False
        # One span is the whole row. A single token sees no other.
        ends = zip(rows.starts, rows.lengths, strict=True)
        whole = tuple(((start, start + length),) if length > 1 else () for start, length in ends)
        if found != {whole}:
            raise PackingError(
                "some tokens of this batch see later tokens, others do not.",
                why=["without pads, whole rows are computed in both directions, or in one"],
                do="Patch the model with unpad=False.",
            )
        return True

    def bidirectional(self, rows: PaddedRows) -> BidirectionalSpans | None:
        """Return the spans of the row without pads, `None` if there are none.

        Raise [`PackingError`] if layers of an unknown kind have spans, or kinds of layers differ.
        """
        noted = {kind: mask.spans for kind, mask in self.masks.items() if isinstance(mask, NotedMask)}
        found = {kind: spans for kind, spans in noted.items() if any(spans.rows)}
        if not found:
            return None
        if unknown := found.keys() - {None, _FULL, _SLIDING}:
            raise PackingError(
                f"tokens of an image see each other in layers of kind {', '.join(sorted(map(str, unknown)))}.",
                why=["packed attention knows spans of tokens in layers with and without a sliding window only"],
                do="Patch the model with unpad=False, or train on text alone.",
            )
        own = found.get(None, RowSpans(()))
        full, sliding = (found.get(kind, own) for kind in (_FULL, _SLIDING))
        if full.rows and sliding.rows and full.joined != sliding.joined:
            raise PackingError(
                "images of a row see each other in layers of one kind, but not in those of another.",
                do="Patch the model with unpad=False, or train on text alone.",
            )
        return BidirectionalSpans(_packed(full.rows, rows), _packed(sliding.rows, rows), full.joined or sliding.joined)


@outside_of_graphs
def handed_masks(mask: Any) -> HandedMasks | None:
    """Return the masks for which a decoder's `attention_mask` stands, `None` for any other mask."""
    if not isinstance(mask, dict):
        noted = getattr(mask, _HANDED, None)
        return HandedMasks({None: noted}, mask) if isinstance(noted, NotedMask) else noted
    masks = {kind: getattr(value, _HANDED, value) for kind, value in mask.items()}
    padding = next((noted.padding for noted in masks.values() if isinstance(noted, NotedMask)), None)
    return None if padding is None else HandedMasks(masks, padding)


def without_empty_masks(call: dict[str, Any]) -> dict[str, Any]:
    """Return a packed call without the empty masks that the model around the decoder has made for each kind."""
    mask = call.get("attention_mask")
    is_empty = isinstance(mask, dict) and any(map(is_empty_mask, mask.values()))
    return {**call, "attention_mask": None} if is_empty else call


def _packed(spans: tuple[tuple[Span, ...], ...], rows: PaddedRows) -> tuple[Span, ...]:
    """Return spans of padded rows as spans of the row without pads."""
    # Rows of 5 and 3 tokens after 1 and 2 pads: span (3, 5) of the second row is span (6, 8).
    packed, before = [], 0
    for own, start, length in zip(spans, rows.starts, rows.lengths, strict=False):
        packed += [(first - start + before, stop - start + before) for first, stop in own]
        before += length
    return tuple(packed)


def _cut(mask: Any, row: int, part: slice) -> Any:
    """Return the part of a mask `(B, 1, L, L)` or `(B, L)` for some columns of one row."""
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        return mask[row if mask.shape[0] > 1 else 0, :, part, part][None]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask[row, part][None]
    raise PackingError(
        f"a mask of type {type(mask).__name__} cannot be cut into rows.",
        do="Load the model with attn_implementation='sdpa'.",
    )
