"""Bidirectional spans: neighbouring tokens of a document that see each other in both directions, as those of an image.

A token of a span also sees all tokens before the span, in the sliding window if the layer has one. So its keys are
one interval, and attention of a span is one call without causality: the span's tokens are the last of the keys. In
Molmo 2 it also sees the later spans of its document, whose tokens are then added to the keys.

Shape letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..errors import InvalidLayout, PackingError, shown
from .shared_prefix import TokenGather

# A span as `(start, stop)`, token numbers in the packed row.
Span: TypeAlias = tuple[int, int]


class BidirectionalSpans(NamedTuple):
    """The spans of a packed row, in order: Gemma 4 has them in its sliding layers only, Gemma 3 in all layers."""

    full: tuple[Span, ...]  # for layers without a sliding window
    sliding: tuple[Span, ...]
    joined: bool = False  # whether the spans of one document see each other, as all images of a row do in Molmo 2

    def of_window(self, sliding_window: int | None) -> tuple[Span, ...]:
        """Return the spans of layers with this sliding window.

        Raise [`PackingError`] if a span is longer than the window, or if spans see each other in a window.
        """
        if sliding_window is None:
            return self.full
        if self.joined and self.sliding:
            raise PackingError(
                f"images of a row see each other, but the layer has a sliding window of {sliding_window} tokens.",
                why=["no model of transformers does both, so it is not known which tokens such an image sees"],
                do="Patch the model with unpad=False, or train on text alone.",
            )
        longest = max((stop - start for start, stop in self.sliding), default=0)
        if longest > sliding_window:
            raise PackingError(
                f"{longest} tokens of an image see each other, but the layer's sliding window has {sliding_window}.",
                why=["models differ in what such an image sees, so packed attention does not compute it"],
                do="Make images smaller, or patch the model with unpad=False.",
            )
        return self.sliding


def plan_spans(
    spans: Sequence[Span], lengths: Sequence[int], device: torch.device | str = "cpu", *, joined: bool = False
) -> tuple[TokenGather, TokenGather, tuple[int, ...], tuple[int, ...]]:
    """Plan the call for these spans in a row of documents of these `lengths` (tokens).

    Return the copies that make its queries, the tokens of the spans, and its keys, for each span the tokens from its
    document's beginning to the span's end; if `joined`, also those of the document's later spans. Then return the
    number of both, for each span. Raise [`InvalidLayout`] if a span is empty or crosses the end of its document.

    The example has documents of 6 and 3 tokens; tokens 2 and 3 are a span:

    ```python
    >>> queries, keys, *lengths = plan_spans([(2, 4)], [6, 3])
    >>> queries.index, keys.index, lengths
    (tensor([2, 3]), tensor([0, 1, 2, 3]), [(2,), (4,)])
    ```
    """
    keys: list[list[Span]] = []  # the intervals of each span's keys
    start, waiting = 0, list(spans)
    for length in lengths:
        own = []
        while waiting and waiting[0][0] < start + length:
            first, stop = waiting.pop(0)
            if not start <= first < stop <= start + length:
                raise _not_inside((first, stop), lengths)
            own.append((first, stop))
        keys += [[(start, stop), *(own[i + 1 :] if joined else [])] for i, (_, stop) in enumerate(own)]
        start += length
    if waiting:
        raise _not_inside(waiting[0], lengths)
    return (
        TokenGather.of_spans(spans, start, device),
        TokenGather.of_spans([part for of_span in keys for part in of_span], start, device),
        tuple(stop - first for first, stop in spans),
        tuple(sum(stop - first for first, stop in of_span) for of_span in keys),
    )


def _not_inside(span: Span, lengths: Sequence[int]) -> InvalidLayout:
    return InvalidLayout(
        f"span {span} is not inside a document: lengths {shown(lengths)}.",
        do="Give each document spans of its own, in the order of the row.",
    )
