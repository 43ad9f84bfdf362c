"""`BranchedLayout`: a packed row in which documents share a prefix that the row holds only once.

It is to documents with shared prefixes what `PackedLayout` (`layout.py`) is to separate documents. A prompt and its
two answers are three pieces of a row and two documents.

Shape letters: B rows, L row length, T packed tokens, P tokens of all documents (a shared token counts once in each
document), S pieces.
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
    """A run of `length` neighbouring tokens, which begins at `start` in the row and at `place` among the copies."""

    start: int
    place: int
    length: int


class Copies(NamedTuple):
    """The copies of a row's tokens, as runs of neighbouring tokens.

    `first` holds the first copy of each token, `again` all further copies. `num_tokens` counts the tokens of the row,
    `num_places` the copies.
    """

    first: tuple[Run, ...]
    again: tuple[Run, ...]
    num_tokens: int
    num_places: int


# Layouts are compared by identity (no `eq`), because `==` of their tensors is no bool.
@dataclass(frozen=True, eq=False)
class BranchedLayout:
    """T tokens cut into pieces. Each document is one or more pieces, and documents may share their first pieces.

    The example has a prompt of 3 tokens with answers of 2 and 1 tokens, and a separate document of 2 tokens:

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
            The pieces in the order of the row.
        paths ([`PackedLayout`]):
            The full documents, each with its own copy of its prefix, one after the other.
        documents (`tuple[tuple[int, ...], ...]`):
            The piece numbers of each document, the prefix first.
        along (`torch.Tensor`):
            Index in the row of each of the documents' P tokens, int64, `(P,)`.
        places (`torch.Tensor`):
            Index among the P tokens of the first copy of each token of the row, int64, `(T,)`.

    Raises:
        [`InvalidLayout`]: by `from_lengths`, if the documents do not fit the pieces.
    """

    pieces: PackedLayout
    paths: PackedLayout
    documents: tuple[tuple[int, ...], ...]
    along: torch.Tensor
    places: torch.Tensor
    # Results that one layer derives from the layout, kept for the other layers of the same forward.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        documents: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
    ) -> BranchedLayout:
        """Make the layout of one row from the `lengths` of its pieces (tokens) and the piece numbers of its documents.

        Raises:
            [`InvalidLayout`]: if a length is not positive, if a piece is in no document, or if a piece follows
                different pieces in different documents.
        """
        pieces = PackedLayout.from_lengths(lengths)
        numbered = tuple(tuple(document) for document in documents)
        _require_prefixes(numbered, len(pieces.lengths))
        along = _tokens(pieces.lengths, numbered)
        paths = PackedLayout.from_lengths([sum(pieces.lengths[p] for p in document) for document in numbered])
        # The first copy of each token: `along` [0, 1, 0, 2] gives places [0, 1, 3].
        places = torch.from_numpy(np.unique(along.numpy(), return_index=True)[1])
        return cls(pieces, paths, numbered, along, places).to(device or "cpu")

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Offsets of the pieces, int32, shape `(S + 1,)`."""
        return self.pieces.cu_seqlens

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return self.pieces.num_tokens

    @property
    def rows(self) -> int:
        """Number of rows B, always 1."""
        return 1

    @property
    def row_length(self) -> int:
        """Row length L in tokens, which is T here."""
        return self.pieces.num_tokens

    @property
    def num_documents(self) -> int:
        """Number of documents, the same as without sharing."""
        return len(self.documents)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document, in tokens."""
        return self.paths.max_seqlen

    @cached_property  # every layer reads it
    def sizes(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a compiled graph may read besides `cu_seqlens`; their sizes may change between batches."""
        layouts = (self.pieces, self.paths, self.keys)
        of_layouts = (tensor for layout in layouts for tensor in (layout.cu_seqlens, *layout.sizes))
        return (*of_layouts, self.along, self.places, self.key_tokens)

    @cached_property  # every layer reads it
    def keys(self) -> PackedLayout:
        """Layout of the keys of each piece: the earlier pieces of its document, then the piece itself."""
        lengths = [sum(self.pieces.lengths[p] for p in seen) for seen in self._seen]
        return PackedLayout.from_lengths(lengths, device=self.cu_seqlens.device)

    @cached_property  # every layer reads it
    def key_tokens(self) -> torch.Tensor:
        """Index in the row of each token of `keys`, int64."""
        return _tokens(self.pieces.lengths, self._seen).to(self.cu_seqlens.device)

    @property
    def _seen(self) -> list[tuple[int, ...]]:
        """Piece numbers that the tokens of each piece may attend to."""
        seen = {piece: document[: i + 1] for document in self.documents for i, piece in enumerate(document)}
        return [seen[piece] for piece in range(len(seen))]

    @cached_property  # every layer reads it
    def copies(self) -> Copies:
        """The copies that make the documents' P tokens from the row's T tokens."""
        return _copies(self.pieces.lengths, self.documents)

    @cached_property  # every layer reads it
    def key_copies(self) -> Copies:
        """The copies that make the tokens of `keys` from the row's T tokens."""
        return _copies(self.pieces.lengths, self._seen)

    def position_ids(self) -> torch.Tensor:
        """Return each token's position in its document, int64, shape `(1, T)`. Positions continue after a prefix."""
        return self.paths.position_ids()[:, self.places]

    def dense_mask(self, sliding_window: int | None = None) -> torch.Tensor:
        """Return the attention mask that the layout stands for, bool, shape `(T, T)`.

        It is quadratic in T, so it is for tests and plots only.
        """
        mask = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool, device=self.along.device)
        for tokens in self.paths.split(self.along):
            alone = PackedLayout.from_lengths([len(tokens)], device=self.along.device)
            mask[tokens[:, None], tokens] = alone.dense_mask(sliding_window)
        return mask

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BranchedLayout:
        """Return this layout with its tensors on `device`."""
        pieces = self.pieces.to(device, non_blocking)
        if pieces is self.pieces:
            return self
        return replace(
            self,
            pieces=pieces,
            paths=self.paths.to(device, non_blocking),
            along=self.along.to(device, non_blocking=non_blocking),
            places=self.places.to(device, non_blocking=non_blocking),
            memo={},  # its tensors are on the other device
        )


def _require_prefixes(documents: Sequence[tuple[int, ...]], pieces: int) -> None:
    """Refuse pieces that are in no document, or that follow different pieces in different documents."""
    before: dict[int, tuple[int, ...]] = {}
    for document in documents:
        for i, piece in enumerate(document):
            if before.setdefault(piece, document[:i]) != document[:i]:
                raise InvalidLayout(
                    f"piece {piece} follows pieces {list(before[piece])} in one document and "
                    f"{list(document[:i])} in another.",
                    why=["a token's result depends on all tokens before it, so the piece cannot be shared"],
                    do="Share only prefixes of documents.",
                )
    if sorted(before) != list(range(pieces)) or not all(documents):
        raise InvalidLayout(
            f"the documents use pieces {sorted(before)}, but the row has {pieces} pieces.",
            do="Put each piece into a document.",
        )


def _tokens(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the row indices of the tokens of each group of pieces, one group after the other, int64."""
    starts = [0, *itertools.accumulate(lengths)]
    return torch.cat([torch.arange(starts[piece], starts[piece + 1]) for group in groups for piece in group])


def _copies(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> Copies:
    """Plan the copies that make groups of pieces, one after the other, from a row of pieces of these lengths."""
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
