"""Find the rows of a padded batch with a common prefix, and build the row without pads that holds the prefix once.

Shape letters: B rows, L row length, T tokens of the row without pads, P true tokens of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .packed import PackedLayout
from .padded_rows import PaddedRows, remember, remembered
from .shared_prefix import TokenGather

# Shorter prefixes are computed in each row. Every further segment needs one more attention call in every layer, which
# is not worth it for a short header that all rows begin with.
SHORTEST = 16
# Attribute of input ids whose rows were compared, so that no later call compares them again.
_KNOWN = "_trl_packfa_shared"


@dataclass(frozen=True, eq=False)
class SharedRows(PaddedRows):
    """[`PaddedRows`] whose row without pads holds each common prefix once.

    An example with the rows [5, 6, 7, 8] and [5, 6, 7, 9, 9], if a prefix of three tokens is enough:

    ```python
    >>> rows = PaddedRows((2, 5), (0, 0), (4, 5))
    >>> shared = share(rows, torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 9]]), shortest=3)
    >>> shared.segments, shared.documents
    ((3, 1, 2), ((0, 1), (0, 2)))
    >>> shared.take(torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 9]]))
    tensor([[5, 6, 7, 8, 9, 9]])
    ```

    Args:
        segments (`tuple[int, ...]`), documents (`tuple[tuple[int, ...], ...]`):
            Lengths of the segments, and the segments of each document, see [`PackedLayout`]; there is a document for
            each row that has tokens.
    """

    segments: tuple[int, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()

    @property
    def num_packed(self) -> int:
        """Number of tokens in the row without pads, T."""
        return sum(self.segments)

    def own_tokens(self, row: int) -> int:
        """Return the number of tokens at the end of a row that no other row shares."""
        document = sum(length > 0 for length in self.lengths[:row])
        return self.segments[self.documents[document][-1]] if self.lengths[row] else 0

    def layout(self, device: torch.device) -> PackedLayout:
        """Return the layout of the row without pads, `(1, T)`."""
        key = ("shared", device, torch.is_inference_mode_enabled())
        if key not in self.memo:
            self.memo[key] = PackedLayout.from_lengths(self.segments, documents=self.documents, device=device)
        return self.memo[key]

    def packed_index(self, device: torch.device) -> torch.Tensor:
        """Return the place of each of the row's tokens among the `B * L`, int64, `(T,)`."""
        return self.index(device).index_select(0, self._gather(device).first_index)

    def _put_back(self, flat: torch.Tensor) -> torch.Tensor:
        return super()._put_back(self._gather(flat.device).gather(flat))

    def _gather(self, device: torch.device) -> TokenGather:
        gather = self.layout(device).sequence_gather
        assert gather is not None, "a layout with documents shares prefixes"
        return gather


def shared_rows_of(rows: PaddedRows, input_ids: torch.Tensor) -> SharedRows | None:
    """Return [`share`], compared once for each tensor of ids: the calls of policy and reference model share the
    result."""
    known = remembered(input_ids, _KNOWN)
    if known is None or known[0] != (rows.starts, rows.lengths):
        known = (rows.starts, rows.lengths), share(rows, input_ids)
        remember(input_ids, _KNOWN, known)
    return known[1]


def tell_shared(input_ids: torch.Tensor, rows: PaddedRows) -> None:
    """Attach to these ids which of their rows share a prefix: their collator has compared them on the host.

    Rows other than [`SharedRows`] share nothing.
    """
    shared = rows if isinstance(rows, SharedRows) else None
    remember(input_ids, _KNOWN, ((rows.starts, rows.lengths), shared))


def share(rows: PaddedRows, input_ids: torch.Tensor, *, shortest: int = SHORTEST) -> SharedRows | None:
    """Find the common prefixes of the rows of `input_ids` `(B, L)`; `None` if no two rows share `shortest` tokens.

    It copies the ids to the host.
    """
    if sum(length >= shortest for length in rows.lengths) < 2:
        return None
    host = input_ids.detach().cpu().numpy()
    tokens = [host[i, start : start + n] for i, (start, n) in enumerate(zip(rows.starts, rows.lengths, strict=True))]
    segments, documents = _segments([ids for ids in tokens if len(ids)], shortest)
    if len(segments) == len(documents) == sum(map(len, documents)):  # one segment for each row: nothing is shared
        return None
    return SharedRows(rows.shape, rows.starts, rows.lengths, rows.widths, segments=segments, documents=documents)


def _segments(rows: Sequence[np.ndarray], shortest: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the lengths of the segments, and the segments that each row is made of.

    A prefix of two or more rows is one segment, and so is a common continuation of some of these rows.
    """
    # In sorted order rows with a common prefix are neighbours. In [5, 6, 7], [5, 6, 8], [9] they share 2 and 0 tokens.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tolist())
    alike = [_alike(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    segments: list[int] = []
    documents: list[tuple[int, ...]] = [()] * len(rows)
    # Each entry: neighbours from `first` up to `stop`, whose first `depth` tokens are in the segments `before`. The
    # last entry comes next, so that a prefix lies beside its continuations.
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while waiting:
        first, stop, depth, before = waiting.pop()
        is_one = stop - first == 1
        end = len(rows[order[first]]) if is_one else min(alike[first : stop - 1])
        if end - depth >= (1 if is_one else shortest):
            before = (*before, len(segments))
            segments.append(end - depth)
            depth = end
        if is_one:
            documents[order[first]] = before
            continue
        cuts = [first, *(i + 1 for i in range(first, stop - 1) if alike[i] == end), stop]
        waiting += [(begin, until, depth, before) for begin, until in itertools.pairwise(cuts)][::-1]
    return tuple(segments), tuple(documents)


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Count the tokens that two rows have in common at their beginning."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
