"""`BranchedLayout`: documents that begin alike, of which a packed row holds the prefix once.

Beside `layout.py`: what a `PackedLayout` is for documents that share nothing, this is for those that do. A prompt and
its two answers are three pieces of a row and two documents.

Shape letters: B rows, L row length, T packed tokens, P tokens of all documents, a shared one counted in each of them,
S pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from .errors import InvalidLayout
from .layout import PackedLayout


class Run(NamedTuple):
    """Neighbouring tokens: `length` of them, from `start` on in the row and from `place` on among the copies."""

    start: int
    place: int
    length: int


class Copies(NamedTuple):
    """Where a row's tokens are copied to, as runs of neighbours: first copies, one of each token, and further ones.

    `num_tokens` are in the row, `num_places` among the copies.
    """

    first: tuple[Run, ...]
    again: tuple[Run, ...]
    num_tokens: int
    num_places: int


# Without `eq`: layouts are told apart by identity, as `==` of their tensors is no bool.
@dataclass(frozen=True, eq=False)
class BranchedLayout:
    """T tokens cut into pieces, and documents made of one or more of them, of which the first may be shared.

    A prompt of 3 tokens with answers of 2 and 1 tokens, and a document of 2 tokens that shares nothing:

    ```python
    >>> layout = BranchedLayout.from_lengths([3, 2, 1, 2], documents=[(0, 1), (0, 2), (3,)])
    >>> layout.pieces.lengths, layout.paths.lengths, layout.keys.lengths
    ((3, 2, 1, 2), (5, 4, 2), (3, 5, 4, 2))
    >>> layout.along
    tensor([ 0,  1,  2,  3,  4,  0,  1,  2,  5,  6,  7])
    >>> layout.position_ids()
    tensor([[0, 1, 2, 3, 4, 3, 0, 1]])
    ```

    Args:
        pieces ([`PackedLayout`]):
            The pieces as they lie in the row, one after the other.
        paths ([`PackedLayout`]):
            The documents as they are without sharing, one after the other.
        documents (`tuple[tuple[int, ...], ...]`):
            For each document the numbers of its pieces, the prefix first.
        along (`torch.Tensor`):
            The number in the row of each of the documents' P tokens, int64, `(P,)`.
        places (`torch.Tensor`):
            For each token of the row where it is first among the P, int64, `(T,)`.

    Raises:
        [`InvalidLayout`]: by `from_lengths`, if the pieces are not those of documents.
    """

    pieces: PackedLayout
    paths: PackedLayout
    documents: tuple[tuple[int, ...], ...]
    along: torch.Tensor
    places: torch.Tensor
    # As of a `PackedLayout`: what layers derive, kept for the other layers of the same forward.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        documents: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
    ) -> BranchedLayout:
        """Layout of pieces of these `lengths` (tokens), in one row, that these documents are made of.

        Raises:
            [`InvalidLayout`]: if a length is not positive, a piece is in no document, or it goes on from one piece in
                one document and from another in the next.
        """
        pieces = PackedLayout.from_lengths(lengths)
        numbered = tuple(tuple(document) for document in documents)
        _require_prefixes(numbered, len(pieces.lengths))
        along = _tokens(pieces.lengths, numbered)
        paths = PackedLayout.from_lengths([sum(pieces.lengths[p] for p in document) for document in numbered])
        # Where each token is first: for [0, 1, 0, 2] that is [0, 1, 3].
        places = torch.from_numpy(np.unique(along.numpy(), return_index=True)[1])
        return cls(pieces, paths, numbered, along, places).to(device or "cpu")

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Offsets of the pieces, int32, shape `(S + 1,)`."""
        return self.pieces.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.pieces.num_tokens

    @property
    def rows(self) -> int:
        """One: pieces lie in one row."""
        return 1

    @property
    def row_length(self) -> int:
        """T."""
        return self.pieces.num_tokens

    @property
    def num_documents(self) -> int:
        """As many as there are without sharing."""
        return len(self.documents)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document, in tokens."""
        return self.paths.max_seqlen

    @cached_property  # every layer asks
    def sizes(self) -> tuple[torch.Tensor, ...]:
        """What a compiled graph may read of this layout, besides `cu_seqlens`: tensors of sizes that may change."""
        layouts = (self.pieces, self.paths, self.keys)
        of_layouts = (tensor for layout in layouts for tensor in (layout.cu_seqlens, *layout.sizes))
        return (*of_layouts, self.along, self.places, self.key_tokens)

    @cached_property  # every layer asks
    def keys(self) -> PackedLayout:
        """For each piece what its tokens may attend to: the pieces before it, and itself at the end."""
        lengths = [sum(self.pieces.lengths[p] for p in seen) for seen in self._seen]
        return PackedLayout.from_lengths(lengths, device=self.cu_seqlens.device)

    @cached_property  # every layer asks
    def key_tokens(self) -> torch.Tensor:
        """The number in the row of each token of `keys`, int64."""
        return _tokens(self.pieces.lengths, self._seen).to(self.cu_seqlens.device)

    @property
    def _seen(self) -> list[tuple[int, ...]]:
        """For each piece those that its tokens may attend to."""
        seen = {piece: document[: i + 1] for document in self.documents for i, piece in enumerate(document)}
        return [seen[piece] for piece in range(len(seen))]

    @cached_property  # every layer asks
    def copies(self) -> Copies:
        """The way from the row's T tokens to the documents' P."""
        return _copies(self.pieces.lengths, self.documents)

    @cached_property  # every layer asks
    def key_copies(self) -> Copies:
        """The way from the row's T tokens to those of `keys`."""
        return _copies(self.pieces.lengths, self._seen)

    def position_ids(self) -> torch.Tensor:
        """Positions that go on from the prefix of each document, int64, shape `(1, T)`."""
        return self.paths.position_ids()[:, self.places]

    def dense_mask(self, sliding_window: int | None = None) -> torch.Tensor:
        """Who may attend to whom, bool, shape `(T, T)`: the meaning of the layout. Quadratic, for tests and plots."""
        mask = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool, device=self.along.device)
        for tokens in self.paths.split(self.along):
            alone = PackedLayout.from_lengths([len(tokens)], device=self.along.device)
            mask[tokens[:, None], tokens] = alone.dense_mask(sliding_window)
        return mask

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BranchedLayout:
        """The same layout with its tensors on `device`."""
        pieces = self.pieces.to(device, non_blocking)
        if pieces is self.pieces:
            return self
        return replace(
            self,
            pieces=pieces,
            paths=self.paths.to(device, non_blocking),
            along=self.along.to(device, non_blocking=non_blocking),
            places=self.places.to(device, non_blocking=non_blocking),
            memo={},  # what is in it lies on the other device
        )


def _require_prefixes(documents: Sequence[tuple[int, ...]], pieces: int) -> None:
    """Each piece is in a document, and after the same pieces in all that it is in."""
    before: dict[int, tuple[int, ...]] = {}
    for document in documents:
        for i, piece in enumerate(document):
            if before.setdefault(piece, document[:i]) != document[:i]:
                raise InvalidLayout(
                    f"piece {piece} goes on from pieces {list(before[piece])} in one document and from "
                    f"{list(document[:i])} in another.",
                    why=["what a token computes depends on all that lies before it: it cannot be shared"],
                    do="Let documents share what they begin with, and nothing else.",
                )
    if sorted(before) != list(range(pieces)) or not all(documents):
        raise InvalidLayout(
            f"documents of the pieces {sorted(before)}, the row has {pieces}.", do="Put each piece into a document."
        )


def _tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """The numbers of the tokens of each group of pieces, one after the other, int64."""
    starts = [0, *itertools.accumulate(lengths)]
    return torch.cat([torch.arange(starts[piece], starts[piece + 1]) for group in groups for piece in group])


def _copies(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> Copies:
    """The way from pieces of these lengths to groups of them, one after the other."""
    # Lengths [3, 2, 1] and groups (0, 1), (0, 2): first (0, 0, 5) and (5, 8, 1), again (0, 5, 3).
    starts = [0, *itertools.accumulate(lengths)]
    first: list[Run] = []
    again: list[Run] = []
    known: set[int] = set()
    place = 0
    for piece in itertools.chain.from_iterable(groups):
        runs, run = again if piece in known else first, Run(starts[piece], place, lengths[piece])
        last = runs[-1] if runs else None
        if last is not None and (last.start + last.length, last.place + last.length) == run[:2]:
            runs[-1] = last._replace(length=last.length + run.length)
        else:
            runs.append(run)
        known.add(piece)
        place += run.length
    return Copies(tuple(first), tuple(again), starts[-1], place)
