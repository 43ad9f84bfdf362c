"""`PackedLayout`, the documents of a packed batch, and `AttentionLayout`, who attends to whom in one attention call.

A `PackedLayout` travels from the collator to the attention kernel.

Shape letters: B rows, L row length, T packed tokens (B * L), S segments (documents, unless documents share a prefix,
see `shared_prefix.py`), M keys of all segments.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..errors import InvalidLayout, shown
from .bidirectional import BidirectionalSpans, plan_spans
from .prefix_tree import PrefixTree
from .shard import RowShard
from .shared_prefix import TokenGather, require_prefixes, visible_segments

_MOST_TOKENS = torch.iinfo(torch.int32).max


# Layouts are compared by identity (no `eq`), because `==` of their tensors is no bool.
@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The queries and keys of one attention call: segment i of the queries attends to segment i of the keys.

    A segment may have more keys than queries. Its queries are then the last tokens of its keys. Without causality, a
    sliding window reaches as far to the right as to the left.

    Args:
        queries ([`PackedLayout`]), keys ([`PackedLayout`]):
            The segments of both; the same layout if documents share no prefix.
        causal (`bool`, *optional*, defaults to `True`):
            Whether a query sees only the keys up to its own. If not, it sees all keys of its segment.
        key_gather ([`TokenGather`], *optional*):
            The copies that make the keys. By default the keys are the row's tokens.
    """

    queries: PackedLayout
    keys: PackedLayout
    causal: bool = True
    key_gather: TokenGather | None = None
    # Results that a kernel derives from the segments (block masks), kept for the forward's other layers.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def has_own_keys(self) -> bool:
        """True if keys have segments of their own, longer than those of the queries."""
        return self.keys is not self.queries

    def gather_keys(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the keys or values of all segments `(M, ...)` from those of the packed tokens `(T, ...)`."""
        return packed if self.key_gather is None else self.key_gather.gather(packed)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The boundaries of documents in T tokens. A document never crosses the end of a row.

    The example has two rows with documents of 2, 3 and 5 tokens:

    ```python
    >>> layout = PackedLayout.from_lengths([2, 3, 5], rows=2)
    >>> layout.cu_seqlens
    tensor([ 0,  2,  5, 10], dtype=torch.int32)
    >>> layout.lengths, layout.rows, layout.row_length, layout.num_tokens, layout.max_seqlen
    ((2, 3, 5), 2, 5, 10, 5)
    >>> layout.position_ids()
    tensor([[0, 1, 0, 1, 2],
            [0, 1, 2, 3, 4]])
    >>> layout.document_ids()
    tensor([[0, 0, 1, 1, 1],
            [2, 2, 2, 2, 2]], dtype=torch.int32)
    ```

    In this one a prompt of 3 tokens is shared by answers of 2 and 1 tokens, and a document of 2 tokens is separate:

    ```python
    >>> layout = PackedLayout.from_lengths([3, 2, 1, 2], documents=[(0, 1), (0, 2), (3,)])
    >>> layout.lengths, layout.full_sequences.lengths, layout.attention.keys.lengths
    ((3, 2, 1, 2), (5, 4, 2), (3, 5, 4, 2))
    >>> layout.position_ids()
    tensor([[0, 1, 2, 3, 4, 3, 0, 1]])
    ```

    Args:
        cu_seqlens (`torch.Tensor`):
            Offsets of the segments in the flattened batch, int32, shape `(S + 1,)`, on the model's device.
        lengths (`tuple[int, ...]`):
            Lengths of the segments in tokens, on the host, so that no kernel launch waits for the device.
        rows (`int`, *optional*, defaults to `1`):
            Number of rows B that hold the T tokens.
        padding (`int`, *optional*, defaults to `0`):
            Number of padding tokens, for counting: the last document, or one that only keeps a rank busy.
        documents (`tuple[tuple[int, ...], ...]`, *optional*):
            The segment numbers of each document, the prefix first. By default each segment is a document.
        bidirectional ([`BidirectionalSpans`], *optional*):
            Tokens that see each other in both directions, as those of an image do in some models.
        causal (`bool`, *optional*, defaults to `True`):
            Whether a token sees only the tokens before it in its document. In an encoder it sees the whole document.
        prefix_tree ([`PrefixTree`], *optional*):
            The common prefixes of these whole documents, if the collator has looked for them: a model patched with
            `share_prefixes=True` computes each prefix once.
        shard ([`RowShard`], *optional*):
            The part that this process holds, if several share the row. Other fields describe the whole row.

    Raises:
        [`InvalidLayout`]: if a length is not positive, if the counts disagree, if a document crosses the end of a row,
            if a segment is in no document, or if it follows different segments in different documents.
    """

    cu_seqlens: torch.Tensor
    lengths: tuple[int, ...]
    rows: int = 1
    padding: int = 0
    documents: tuple[tuple[int, ...], ...] | None = None
    bidirectional: BidirectionalSpans | None = None
    causal: bool = True
    prefix_tree: PrefixTree | None = None
    shard: RowShard | None = None
    # Results that a kernel derives from the boundaries (block masks, groups), kept for the forward's other layers.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            empty = (f"document {number} has {length}" for number, length in enumerate(self.lengths) if length < 1)
            wrong = f"document lengths must all be positive, but {next(empty, 'there is none')}."
            raise InvalidLayout(wrong, do="Drop empty documents before packing.")
        if self.cu_seqlens.shape != (len(self.lengths) + 1,) or self.cu_seqlens.dtype != torch.int32:
            raise InvalidLayout(
                f"cu_seqlens must be int32 of shape ({len(self.lengths) + 1},) for {len(self.lengths)} documents, "
                f"got {self.cu_seqlens.dtype} of shape {tuple(self.cu_seqlens.shape)}."
            )
        if self.rows < 1 or self.num_tokens % self.rows:
            raise InvalidLayout(f"{self.num_tokens} tokens cannot be laid out in rows={self.rows} equal rows.")
        # Lengths [2, 3, 5] in rows of 5: documents end at 2, 5 and 10, so no row end (5, 10) is left over.
        row_ends = range(self.row_length, self.num_tokens, self.row_length)
        if left_over := set(row_ends).difference(itertools.accumulate(self.lengths)):
            raise InvalidLayout(
                f"a document crosses the end of a row: lengths {shown(self.lengths)} in {self.rows} rows of "
                f"{self.row_length} tokens, no document ends at token {min(left_over)}.",
                do="Let the last document of each row end with the row. Padding counts as one document.",
            )
        if self.documents is not None:
            require_prefixes(self.documents, len(self.lengths))
            if self.bidirectional is not None or not self.causal:
                raise InvalidLayout("documents whose tokens see later tokens cannot share prefixes.")

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        rows: int = 1,
        padding: int = 0,
        documents: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> PackedLayout:
        """Make the layout of documents with these `lengths` (tokens), in order, in `rows` equal rows.

        Its offsets are on `device`. With `documents`, `lengths` are those of segments, see [`PackedLayout`].

        Raises:
            [`InvalidLayout`]: if a length is not an integer, and as for [`PackedLayout`].
        """
        try:
            # `index` accepts integers of numpy and torch. It refuses floats, which `int` would cut off.
            lengths = tuple(operator.index(length) for length in lengths)
        except TypeError as error:
            raise InvalidLayout(f"document lengths must be integers, got {lengths!r:.200}.") from error
        if sum(lengths) > _MOST_TOKENS or min(lengths, default=0) < 0:
            raise InvalidLayout(
                f"document lengths must all be positive, with a sum of {_MOST_TOKENS} tokens at most, "
                f"got {sum(lengths)}.",
                why=["kernels take offsets as int32"],
            )
        numbered = None if documents is None else tuple(map(tuple, documents))
        return cls(_offsets(lengths).to(device), lengths, rows, padding, numbered)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, *, rows: int = 1) -> PackedLayout:
        """Make a layout from FlashAttention's offsets, integers of shape `(S + 1,)`. Copy them to the host once.

        Raises:
            [`InvalidLayout`]: if they do not begin at 0, or decrease.
        """
        # Offsets [0, 2, 5, 10] are lengths (2, 3, 5).
        offsets = cu_seqlens.tolist()
        if cu_seqlens.dim() != 1 or len(offsets) < 2 or offsets[0] != 0:
            found = f"{shown(cu_seqlens.flatten().tolist())} of shape {tuple(cu_seqlens.shape)}"
            raise InvalidLayout(f"cu_seqlens must be one-dimensional and start at 0, got {found}.")
        lengths = tuple(end - start for start, end in itertools.pairwise(offsets))
        if min(lengths) < 0:
            number = lengths.index(min(lengths)) + 1
            raise InvalidLayout(f"cu_seqlens must not decrease, but offset {number} is below the one before it.")
        if 0 in lengths:  # repeated offsets only pad cu_seqlens to a fixed size
            return cls.from_lengths([n for n in lengths if n], rows=rows, device=cu_seqlens.device)
        return cls(cu_seqlens.to(torch.int32), lengths, rows)

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> PackedLayout:
        """Make a layout from `position_ids` of shape `(B, L)`. Copy them to the host once.

        A document starts at each position that is not its predecessor plus one (transformers' rule), and at the start
        of each row.
        """
        if position_ids.dim() != 2 or position_ids.shape[1] == 0:
            raise InvalidLayout(f"position_ids must have shape (B, L), got {tuple(position_ids.shape)}.")
        host = position_ids.detach().cpu()
        starts = torch.ones(host.shape, dtype=torch.bool)
        # Positions [0, 1, 2, 0, 1]: documents begin at tokens 0 and 3, so the offsets are [0, 3, 5].
        starts[:, 1:] = host.diff(dim=1) != 1
        offsets = [*starts.flatten().nonzero().flatten().tolist(), host.numel()]
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        return cls.from_lengths(lengths, rows=host.shape[0], device=position_ids.device)

    # Every layer reads these. `cached_property` writes into `__dict__`, which a frozen dataclass allows.
    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens T, with padding."""
        return sum(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents, with a last document of padding."""
        return len(self.lengths if self.documents is None else self.documents)

    @property
    def true_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents, without padding."""
        # Padding may be several documents: of an example with parts that runs idle, or of a row that processes share.
        ends, true = itertools.accumulate(self.lengths), self.num_tokens - self.padding
        return tuple(length for length, end in zip(self.lengths, ends, strict=True) if end <= true)

    @property
    def row_length(self) -> int:
        """Row length L in tokens."""
        return self.num_tokens // self.rows

    @property
    def local_shape(self) -> tuple[int, int]:
        """Rows and row length that this process holds."""
        return self.rows, self.row_length if self.shard is None else self.row_length // self.shard.size

    @cached_property
    def whole(self) -> PackedLayout:
        """The layout of the whole row in a process that holds a part of it."""
        return self if self.shard is None else replace(self, shard=None, memo={})

    @cached_property
    def max_seqlen(self) -> int:
        """Length of the longest document, in tokens."""
        return max(self.lengths) if self.documents is None else self.full_sequences.max_seqlen

    @property
    def shares_prefixes(self) -> bool:
        """True if documents share prefixes that the row holds once."""
        return self.documents is not None

    @cached_property
    def attention(self) -> AttentionLayout:
        """The attention layout: each token attends to its document's earlier tokens and itself, or to all of it."""
        # Not `self`: the two would refer to each other, and live until Python's garbage collector runs.
        queries, device = PackedLayout(self.cu_seqlens, self.lengths), self.cu_seqlens.device
        if self.documents is None:
            return AttentionLayout(queries, queries, self.causal)
        visible = visible_segments(self.documents)
        keys = PackedLayout.from_lengths([sum(self.lengths[i] for i in seen) for seen in visible], device=device)
        return AttentionLayout(queries, keys, key_gather=TokenGather.of_segments(self.lengths, visible, device))

    def bidirectional_attention(self, sliding_window: int | None) -> tuple[TokenGather, AttentionLayout] | None:
        """Return the tokens of the spans and their attention in layers with this window; `None` without spans.

        The causal attention of [`PackedLayout.attention`] holds for all other tokens.

        Raises:
            [`PackingError`]: if a span is longer than the window, or if spans see each other in a window.
        """
        spans = () if self.bidirectional is None else self.bidirectional.of_window(sliding_window)
        key = ("spans", sliding_window)
        if spans and key not in self.memo:
            device, joined = self.cu_seqlens.device, self.bidirectional is not None and self.bidirectional.joined
            gather, key_gather, *lengths = plan_spans(spans, self.lengths, device, joined=joined)
            queries, keys = (PackedLayout.from_lengths(n, device=device) for n in lengths)
            self.memo[key] = gather, AttentionLayout(queries, keys, causal=False, key_gather=key_gather)
        return self.memo.get(key)

    def with_bidirectional(self, spans: BidirectionalSpans) -> PackedLayout:
        """Return this layout with these spans."""
        return replace(self, bidirectional=spans, memo={})

    def in_both_directions(self) -> PackedLayout:
        """Return this layout with tokens that see their whole document."""
        return replace(self, causal=False, memo={})

    @cached_property
    def full_sequences(self) -> PackedLayout:
        """The layout of whole documents, each with its own copy of its prefix, one after the other."""
        if self.documents is None:
            return self
        lengths = [sum(self.lengths[i] for i in document) for document in self.documents]
        return PackedLayout.from_lengths(lengths, device=self.cu_seqlens.device)

    @cached_property
    def sequence_gather(self) -> TokenGather | None:
        """The copies that make `full_sequences` from the row's tokens, `None` if nothing is shared."""
        if self.documents is None:
            return None
        return TokenGather.of_segments(self.lengths, self.documents, self.cu_seqlens.device)

    @cached_property
    def pairs_saved(self) -> float:
        """Pairs of query and key of whole documents, divided by those of segments whose prefixes run once."""
        attention = self.attention
        whole = sum(length**2 / 2 for length in self.full_sequences.lengths)
        # A segment without a prefix is a document; after a prefix, each query is taken to see all keys.
        pairs = zip(attention.queries.lengths, attention.keys.lengths, strict=True)
        return whole / sum(n**2 / 2 if n == m else n * m for n, m in pairs)

    @cached_property
    def sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets `(S + 1,)`, int32, and a tensor `(max_seqlen + 1, 0)`: lengths as sizes on the host, for graphs.

        torch.compile recompiles for every new Python int, but sizes of tensors may be dynamic. It also makes separate
        graphs for sizes 0 and 1, so each size here is a length plus one.
        """
        return _offsets(self.lengths), torch.empty(max(self.lengths) + 1, 0)

    @cached_property
    def graph_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of this layout that a compiled graph may read. Their sizes may change between batches."""
        attention, gather = self.attention, self.sequence_gather
        own = [x for layout in (attention.queries, attention.keys) for x in (layout.cu_seqlens, *layout.sizes)]
        if attention.key_gather is None or gather is None:
            return tuple(own)
        indices = (gather.index, gather.first_index, attention.key_gather.index)
        return (*own, *self.full_sequences.graph_tensors, *indices)

    def position_ids(self) -> torch.Tensor:
        """Return each token's position in its document, int64, shape `(B, L)`. Positions continue after a prefix."""
        if (gather := self.sequence_gather) is not None:
            return self.full_sequences.position_ids()[:, gather.first_index]
        lengths, cu_seqlens = self.cu_seqlens.diff(), self.cu_seqlens[:-1]
        # Lengths [3, 2] give starts [0, 0, 0, 3, 3] and positions [0, 1, 2, 0, 1]. Without `output_size` the host
        # would wait for the device.
        starts = torch.repeat_interleave(cu_seqlens, lengths, output_size=self.num_tokens)
        positions = torch.arange(self.num_tokens, device=self.cu_seqlens.device) - starts
        return positions.view(self.rows, self.row_length)

    def document_ids(self) -> torch.Tensor:
        """Return the segment number of each token, int32, shape `(B, L)`: its document's, if no prefix is shared."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.cu_seqlens.device)
        ids = torch.repeat_interleave(numbers, self.cu_seqlens.diff(), output_size=self.num_tokens)
        return ids.view(self.rows, self.row_length)

    def flash_kwargs(self) -> dict[str, torch.Tensor | int]:
        """Return the boundaries under TRL's and transformers' keys, as TRL's padding-free collator sends them."""
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "seq_idx": self.document_ids(),
        }

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a `(T, ...)` or `(B, L, ...)` tensor into its S segments, views of shape `(length, ...)`."""
        if tensor.shape[0] != self.num_tokens:
            tensor = tensor.flatten(0, 1)
        return tensor.split(list(self.lengths))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedLayout:
        """Return this layout with its offsets on `device`; it is made once for each device."""
        return self if self.cu_seqlens.device == device else self._on(torch.device(device), non_blocking)

    @torch.inference_mode(False)  # autograd accepts no tensors that were made there, and the layout may train later
    def _on(self, device: torch.device, non_blocking: bool) -> PackedLayout:
        if device in self.memo:
            return self.memo[device]
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=non_blocking)
        is_here = cu_seqlens is self.cu_seqlens  # "cuda" is the current one of them
        return self if is_here else self.memo.setdefault(device, replace(self, cu_seqlens=cu_seqlens, memo={}))

    def pin_memory(self) -> PackedLayout:
        """Return this layout with its offsets in page-locked memory, from where `to` need not make the host wait."""
        return replace(self, cu_seqlens=self.cu_seqlens.pin_memory(), memo={})


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the start of each segment and the end of the last one, int32, shape `(S + 1,)`."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), dim=0, out=offsets[1:])
    return offsets
