"""Rows of a padded batch that begin with the same tokens, and the row without pads that holds these once.

Shape letters: B rows, L row length, T tokens of the row without pads, P true tokens of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..branches import BranchedLayout
from .padded_rows import PaddedRows, remember, remembered
from .spread import spread

# Prefixes of fewer tokens are computed in each row: a piece more is a call of the attention more in every layer, and
# what all rows begin with, a token or a short header, is not worth it.
SHORTEST = 16
# What input ids carry once it is known where their rows are alike: no later call compares them again.
_KNOWN = "_trl_packfa_shared"


@dataclass(frozen=True, eq=False)
class SharedRows(PaddedRows):
    """[`PaddedRows`] whose row without pads holds the tokens that rows begin with once.

    Rows [5, 6, 7, 8] and [5, 6, 7, 9, 9], where three tokens are worth it:

    ```python
    >>> rows = PaddedRows((2, 5), (0, 0), (4, 5))
    >>> shared = share(rows, torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 9]]), shortest=3)
    >>> shared.pieces, shared.documents
    ((3, 1, 2), ((0, 1), (0, 2)))
    >>> shared.take(torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 9]]))
    tensor([[5, 6, 7, 8, 9, 9]])
    ```

    Args:
        pieces (`tuple[int, ...]`), documents (`tuple[tuple[int, ...], ...]`):
            As of a [`BranchedLayout`]; a document for each row that has tokens.
    """

    pieces: tuple[int, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()

    @property
    def num_packed(self) -> int:
        """T."""
        return sum(self.pieces)

    def own_tokens(self, row: int) -> int:
        """How many tokens at its end a row has to itself."""
        document = sum(length > 0 for length in self.lengths[:row])
        return self.pieces[self.documents[document][-1]] if self.lengths[row] else 0

    def layout(self, device: torch.device) -> BranchedLayout:  # type: ignore[override]
        """The row without pads, `(1, T)`."""
        key = ("branches", device, torch.is_inference_mode_enabled())
        if key not in self.memo:
            self.memo[key] = BranchedLayout.from_lengths(self.pieces, documents=self.documents, device=device)
        return self.memo[key]

    def packed_index(self, device: torch.device) -> torch.Tensor:
        """The number of each of the row's tokens among the `B * L` places, int64, `(T,)`."""
        return self.index(device).index_select(0, self.layout(device).places)

    def _put_back(self, flat: torch.Tensor) -> torch.Tensor:
        return super()._put_back(spread(flat, self.layout(flat.device)))


def shared_rows_of(rows: PaddedRows, input_ids: torch.Tensor) -> SharedRows | None:
    """[`share`], compared once for each tensor of ids: the policy's call and its reference's share it."""
    known = remembered(input_ids, _KNOWN)
    if known is None or known[0] != (rows.starts, rows.lengths):
        known = (rows.starts, rows.lengths), share(rows, input_ids)
        remember(input_ids, _KNOWN, known)
    return known[1]


def tell_shared(input_ids: torch.Tensor, rows: PaddedRows) -> None:
    """Let it be known which rows of these ids begin alike, as their collator has compared them on the host: those of
    [`SharedRows`], none of other rows."""
    shared = rows if isinstance(rows, SharedRows) else None
    remember(input_ids, _KNOWN, ((rows.starts, rows.lengths), shared))


def share(rows: PaddedRows, input_ids: torch.Tensor, *, shortest: int = SHORTEST) -> SharedRows | None:
    """The rows of `input_ids` `(B, L)` with what they begin with once, `None` if no two of them share `shortest`
    tokens; copies the ids to the host."""
    if sum(length >= shortest for length in rows.lengths) < 2:
        return None
    host = input_ids.detach().cpu().numpy()
    tokens = [host[i, start : start + n] for i, (start, n) in enumerate(zip(rows.starts, rows.lengths, strict=True))]
    pieces, documents = _branches([ids for ids in tokens if len(ids)], shortest)
    if len(pieces) == len(documents) == sum(map(len, documents)):  # a piece each: nothing is shared
        return None
    return SharedRows(rows.shape, rows.starts, rows.lengths, rows.widths, pieces=pieces, documents=documents)


def _branches(rows: Sequence[np.ndarray], shortest: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Lengths of pieces, and which of them each row is made of: whatever two or more rows begin with is one piece, and
    so is what some of these go on with."""
    # In alphabetical order rows that begin alike are neighbours. [5, 6, 7], [5, 6, 8], [9]: neighbours share 2 and 0.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    alike = [_alike(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    pieces: list[int] = []
    documents: list[tuple[int, ...]] = [()] * len(rows)
    # Neighbours from `first` up to `stop` whose first `depth` tokens are in the pieces `before`; the last is looked at
    # next, so that a prefix lies beside what goes on from it.
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while waiting:
        first, stop, depth, before = waiting.pop()
        is_one = stop - first == 1
        end = len(rows[order[first]]) if is_one else min(alike[first : stop - 1])
        if end - depth >= (1 if is_one else shortest):
            before = (*before, len(pieces))
            pieces.append(end - depth)
            depth = end
        if is_one:
            documents[order[first]] = before
            continue
        cuts = [first, *(i + 1 for i in range(first, stop - 1) if alike[i] == end), stop]
        waiting += [(begin, until, depth, before) for begin, until in itertools.pairwise(cuts)][::-1]
    return tuple(pieces), tuple(documents)


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows begin with alike."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
