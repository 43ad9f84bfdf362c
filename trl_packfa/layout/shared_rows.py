"""Find the documents of a batch with a common prefix, and build the row that holds the prefix once.

Shape letters: B rows, L row length, T tokens of the row without pads, P true tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .packed import PackedLayout
from .padded_rows import PaddedRows, remember, remembered
from .prefix_tree import SHORTEST, PrefixTree
from .shared_prefix import TokenGather

# Attributes of input ids whose padded rows, or packed documents, were compared.
_KNOWN, _KNOWN_PACKED = "_trl_packfa_shared", "_trl_packfa_shared_documents"


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
    """

    # As in [`PackedLayout`]; there is a document for each row that has tokens.
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

    def _make_layout(self, device: torch.device) -> PackedLayout:
        return PackedLayout.from_lengths(self.segments, documents=self.documents, device=device)

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
    """Return [`share`], compared once for each tensor of ids: policy and reference model share it."""
    known = remembered(input_ids, _KNOWN)
    if known is None or known[0] != (rows.starts, rows.lengths):
        known = (rows.starts, rows.lengths), share(rows, input_ids)
        remember(input_ids, _KNOWN, known)
    return known[1]


def tell_shared(input_ids: torch.Tensor, rows: PaddedRows) -> None:
    """Attach to these ids which rows their collator has found to share a prefix: none but [`SharedRows`] do."""
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
    tree = PrefixTree.of([ids for ids in tokens if len(ids)], shortest=shortest)
    if not tree.saved:
        return None
    return SharedRows(rows.shape, rows.starts, rows.lengths, rows.widths, **tree._asdict())


class SharedDocuments(SharedRows):
    """[`SharedRows`] of a packed batch `(B, L)`: its documents stand one after the other, without pads."""

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the index of each token, int64, `(P,)`."""
        return torch.arange(self.num_tokens, device=device)


def shared_documents_of(layout: PackedLayout, input_ids: torch.Tensor) -> SharedDocuments | None:
    """Return the documents of a packed batch `(B, L)` with each common prefix once; `None` if no two share one.

    They are a matter of the ids, and a layout may be used for several batches: so they are kept with the tensor of
    ids. The ids are compared on the host, unless they lie on an accelerator and the collator has compared them.
    """
    known = remembered(input_ids, _KNOWN_PACKED)
    if known is None or known[0] != (layout.rows, layout.lengths):
        tree, shape = _given_tree(layout, input_ids) or tree_of(layout, input_ids), (layout.rows, layout.row_length)
        shared = SharedDocuments(shape, (), layout.lengths, **tree._asdict())
        known = (layout.rows, layout.lengths), shared if tree.saved else None
        remember(input_ids, _KNOWN_PACKED, known)
    return known[1]


def _given_tree(layout: PackedLayout, input_ids: torch.Tensor) -> PrefixTree | None:
    """Return the tree that the collator has made, if it is one of these ids.

    On a CPU they are compared anew, which costs little there. An accelerator would wait for that, so it takes the
    tree, for one batch.
    """
    first = _KNOWN_PACKED not in layout.memo
    layout.memo[_KNOWN_PACKED] = True
    return layout.prefix_tree if first and input_ids.device.type != "cpu" else None


def tree_of(layout: PackedLayout, input_ids: torch.Tensor) -> PrefixTree:
    """Compare the documents of a packed batch by their ids `(B, L)`, on the host."""
    return PrefixTree.of([ids.numpy() for ids in layout.split(input_ids.detach().cpu())])
