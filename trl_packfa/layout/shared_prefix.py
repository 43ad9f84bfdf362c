"""Copy a row's tokens where documents share a prefix that the row holds only once.

A prompt with two answers is three segments of a row and two documents. Attention needs the prompt's keys once for each
answer. Other code needs whole documents, each with its own copy of the prompt.

Shape letters: T packed tokens, P copies of tokens (a shared token has several).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..errors import InvalidLayout


class Span(NamedTuple):
    """`length` neighbouring tokens that begin at `start` in the row and at `place` among the copies."""

    start: int
    place: int
    length: int


# Compared by identity (no `eq`), because `==` of its tensors is no bool.
@dataclass(frozen=True, eq=False)
class TokenGather:
    """The copies that make groups of segments, one group after the other, from a row's tokens.

    The example has a prompt of 3 tokens with answers of 2 and 1 tokens:

    ```python
    >>> gather = TokenGather.of_segments([3, 2, 1], [(0, 1), (0, 2)])
    >>> gather.index
    tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])
    >>> gather.first_index
    tensor([0, 1, 2, 3, 4, 8])
    >>> gather.first, gather.again
    ((Span(start=0, place=0, length=5), Span(start=5, place=8, length=1)), (Span(start=0, place=5, length=3),))
    ```
    """

    index: torch.Tensor  # of each copy in the row, int64, `(P,)`
    first_index: torch.Tensor  # of the first copy of each token among the copies, int64, `(T,)`
    # The first copy of each token, and all further copies, as spans of neighbouring tokens.
    first: tuple[Span, ...]
    again: tuple[Span, ...]
    num_tokens: int  # of the row, T

    @classmethod
    def of_segments(
        cls, lengths: Sequence[int], groups: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> TokenGather:
        """Plan the copies for groups of segment numbers. `lengths` are those of all segments, in the row's order."""
        starts, segments = [0, *itertools.accumulate(lengths)], [i for group in groups for i in group]
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in segments])
        first_index = torch.from_numpy(np.unique(index.numpy(), return_index=True)[1])
        # The first copies and the further copies, with neighbours joined.
        first: list[Span] = []
        again: list[Span] = []
        known: set[int] = set()
        places = itertools.accumulate((lengths[i] for i in segments), initial=0)
        for segment, place in zip(segments, places, strict=False):
            spans, span = again if segment in known else first, Span(starts[segment], place, lengths[segment])
            last = spans[-1] if spans else None
            if last is not None and (last.start + last.length, last.place + last.length) == span[:2]:
                spans[-1] = last._replace(length=last.length + span.length)
            else:
                spans.append(span)
            known.add(segment)
        return cls(index.to(device), first_index.to(device), tuple(first), tuple(again), starts[-1])

    @classmethod
    def of_spans(
        cls, spans: Sequence[tuple[int, int]], num_tokens: int, device: torch.device | str = "cpu"
    ) -> TokenGather:
        """Plan the copies of these spans `(start, stop)`. Tokens may be in none, so `take_first` cannot be used."""
        index = torch.cat([torch.arange(start, stop) for start, stop in spans])
        places = itertools.accumulate((stop - start for start, stop in spans), initial=0)
        again = tuple(Span(start, place, stop - start) for (start, stop), place in zip(spans, places, strict=False))
        return cls(index.to(device), index.new_empty(0).to(device), (), again, num_tokens)

    @property
    def num_copies(self) -> int:
        """Number of copies, P."""
        return self.index.shape[0]

    def gather(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the copies `(P, ...)` of packed tokens `(T, ...)`; gradients of a token's copies are added."""
        if _by_index(packed):
            return packed.index_select(0, self.index)
        return _Gather.apply(packed, self)  # type: ignore[return-value]

    def take_first(self, copies: torch.Tensor) -> torch.Tensor:
        """Return packed tokens `(T, ...)` from copies `(P, ...)`: the first copy of each token."""
        if _by_index(copies):
            return copies.index_select(0, self.first_index)
        return _TakeFirst.apply(copies, self)  # type: ignore[return-value]


def require_prefixes(documents: Sequence[tuple[int, ...]], segments: int) -> None:
    """Raise [`InvalidLayout`] for segments in no document, or after different segments in different documents."""
    before: dict[int, tuple[int, ...]] = {}
    for document in documents:
        for i, segment in enumerate(document):
            if before.setdefault(segment, document[:i]) != document[:i]:
                raise InvalidLayout(
                    f"segment {segment} follows segments {list(before[segment])} in one document and "
                    f"{list(document[:i])} in another.",
                    why=["a token's result depends on all tokens before it, so the segment cannot be shared"],
                    do="Share only prefixes of documents.",
                )
    if sorted(before) != list(range(segments)) or not all(documents):
        raise InvalidLayout(
            f"the documents use segments {sorted(before)}, but the row has {segments} segments.",
            do="Put each segment into a document.",
        )


def visible_segments(documents: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each segment the segments that its tokens may attend to: its prefix, then itself."""
    # Documents (0, 1) and (0, 2) give [(0,), (0, 1), (0, 2)].
    seen = {segment: document[: i + 1] for document in documents for i, segment in enumerate(document)}
    return [seen[segment] for segment in range(len(seen))]


def _by_index(tensor: torch.Tensor) -> bool:
    """Tell whether to copy tokens by index, in one launch on accelerators; on a CPU they are copied span by span."""
    # On a CPU adding the gradients of 4,096 tokens with 576 features takes hundreds of times longer by index.
    return tensor.device.type != "cpu" or torch.compiler.is_compiling()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, plan: TokenGather) -> torch.Tensor:
        ctx.plan = plan
        copies = packed.new_empty(plan.num_copies, *packed.shape[1:])
        for tokens, places in _pairs(packed, copies, (*plan.first, *plan.again)):
            places.copy_(tokens)
        return copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        packed = _first_copies(gradient, ctx.plan)
        for tokens, places in _pairs(packed, gradient, ctx.plan.again):
            tokens.add_(places)
        return packed, None


class _TakeFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: torch.Tensor, plan: TokenGather) -> torch.Tensor:
        ctx.plan = plan
        return _first_copies(copies, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan = ctx.plan
        copies = gradient.new_empty(plan.num_copies, *gradient.shape[1:])
        for tokens, places in _pairs(gradient, copies, plan.first):
            places.copy_(tokens)
        for _, places in _pairs(gradient, copies, plan.again):
            places.zero_()
        return copies, None


def _first_copies(copies: torch.Tensor, plan: TokenGather) -> torch.Tensor:
    """Return packed tokens `(T, ...)`, each from its first copy; zeros in a plan without first copies."""
    make = copies.new_empty if plan.first else copies.new_zeros  # every token is written below, if any is
    packed = make(plan.num_tokens, *copies.shape[1:])
    for tokens, places in _pairs(packed, copies, plan.first):
        tokens.copy_(places)
    return packed


def _pairs(
    packed: torch.Tensor, copies: torch.Tensor, spans: Sequence[Span]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each span its tokens in the row and its places among the copies, as views."""
    for start, place, length in spans:
        yield packed[start : start + length], copies[place : place + length]
