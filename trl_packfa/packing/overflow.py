"""Handle documents longer than `max_length`, and count every dropped token.

A kept document is one span of tokens, a truncated one a shorter span, a split one several. The first token of a span
is never trained, because no token precedes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np

from ..errors import InvalidConfig, InvalidDataset

OVERFLOW_POLICIES = ("truncate", "split", "drop", "error")
# Cut documents wherever a row of `max_length` tokens is full. Users cannot choose it: the strategy `wrapped` sets it.
WRAP = "cut at rows"


class Spans(NamedTuple):
    """Parts of documents to train on: three int64 arrays of one length."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True)
class PackingReport:
    """Counts of documents and tokens before and after packing, and of those that were dropped.

    `shared_tokens` are those of packed documents that are not computed, because a prefix runs once for several.
    `image_tokens` are those of packed documents that stand for images.
    """

    documents: int
    tokens: int
    too_long: int = 0
    truncated: int = 0
    split: int = 0
    dropped_too_long: int = 0
    dropped_untrained: int = 0
    tokens_lost: int = 0
    packed_documents: int = 0
    packed_tokens: int = 0
    trained_tokens: int = 0
    shared_tokens: int = 0
    image_tokens: int = 0

    @classmethod
    def of_seen(cls, documents: int, tokens: int, trained_tokens: int, image_tokens: int) -> PackingReport:
        """Make the report of documents that have trained whole."""
        packed = {"packed_documents": documents, "packed_tokens": tokens, "trained_tokens": trained_tokens}
        return cls(documents, tokens, **packed, image_tokens=image_tokens)

    def to_dict(self) -> dict[str, int]:
        """Return the counts as a dictionary, for JSON."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Return label and value of each count that a reader needs, without zeros."""
        always = ("documents", "tokens", "packed_documents", "packed_tokens", "trained_tokens")
        share = {"tokens_lost": f" ({self.tokens_lost / self.tokens:.1%})"} if self.tokens else {}
        shown = [f.name for f in fields(self) if f.name in always or getattr(self, f.name)]
        return [(name.replace("_", " "), f"{getattr(self, name):,}{share.get(name, '')}") for name in shown]


def plan_overflow(
    lengths: np.ndarray,
    trained: np.ndarray | TrainedTokens,
    *,
    max_length: int | None,
    policy: str,
    as_padded: bool = False,
) -> tuple[Spans, PackingReport]:
    """Cut documents to `max_length` tokens (`None`: no limit) by `policy`, and drop what cannot be trained.

    `lengths` are the tokens of each document, int64, `(S,)`; `trained` tells which tokens have a label, bool, `(T,)`,
    documents one after the other, or as runs. `policy` is one of `OVERFLOW_POLICIES`, or `WRAP`.

    `as_padded` keeps the untrained documents that TRL keeps, so that batches hold the examples of its padded run. TRL
    keeps a document with a label within `max_length`, even if only the first token has one. Without `max_length` it
    keeps every document that has a token. TRL does not split documents: parts of a split document are dropped if they
    train nothing.

    Raises:
        [`InvalidDataset`]: with policy `"error"` if a document is too long; or if no document is left.
    """
    if policy != WRAP:
        require_policy(policy)
    # Runs take a few numbers for each document, a mask takes one byte for each token of the dataset.
    trained = TrainedTokens.from_masks([trained]) if isinstance(trained, np.ndarray) else trained
    limit = max_length if max_length is not None else int(lengths.max(initial=1))
    too_long = lengths > limit
    if policy == "error" and too_long.any():
        first = int(np.flatnonzero(too_long)[0])
        raise InvalidDataset(
            f"document {first} has {lengths[first]} tokens, max_length is {limit} (overflow='error').",
            why=[f"{int(too_long.sum())} of {len(lengths)} documents are too long"],
            do="Raise max_length, or choose overflow='truncate', 'split' or 'drop'.",
        )
    spans = _wrap(lengths, trained, limit) if policy == WRAP else _cut(lengths, limit, policy)
    counts = _trained_in(spans, lengths, trained)
    stays = counts > 0
    if policy == WRAP:  # rows stay whole: untrained parts are kept in place, which costs nothing
        stays = np.ones_like(stays)
    elif as_padded and policy != "split":
        stays = (spans.stop > spans.start) if max_length is None else _labelled_in(spans, lengths, trained) > 0
    kept = Spans(*(part[stays] for part in spans))
    if not stays.any() or not (as_padded or counts.any()):
        raise nothing_trains(len(lengths), max_length=max_length, policy=policy)
    packed_tokens = int((kept.stop - kept.start).sum())
    # With WRAP a short document is cut, too, if a row ends inside it. Cut documents have several spans.
    cut = int(too_long.sum()) if policy == "split" else int((np.bincount(kept.document) > 1).sum())
    report = PackingReport(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        too_long=int(too_long.sum()),
        truncated=int(too_long.sum()) if policy == "truncate" else 0,
        split=cut if policy in ("split", WRAP) else 0,
        dropped_too_long=int(too_long.sum()) if policy == "drop" else 0,
        dropped_untrained=len(lengths) - len(np.unique(kept.document)) if policy == WRAP else int((~stays).sum()),
        tokens_lost=int(lengths.sum()) - packed_tokens,
        packed_documents=len(kept.document),
        packed_tokens=packed_tokens,
        trained_tokens=int(counts.sum()),
    )
    return kept, report


def nothing_trains(documents: int, *, max_length: int | None, policy: str) -> InvalidDataset:
    """Return the error for a dataset of this many documents, none of which has a token to train on."""
    return InvalidDataset(
        f"no document has a token to train on: {documents} documents, max_length={max_length}, overflow='{policy}'.",
        why=["labels are all -100 within max_length, or documents are shorter than two tokens"],
        do="Raise max_length, or check completion_only_loss, assistant_only_loss and the dataset's labels.",
    )


def require_policy(policy: str) -> None:
    """Refuse a policy that does not exist."""
    if policy not in OVERFLOW_POLICIES:
        raise InvalidConfig(f"overflow='{policy}' does not exist.", do=f"Choose one of {list(OVERFLOW_POLICIES)}.")


def _cut(lengths: np.ndarray, limit: int, policy: str) -> Spans:
    documents = np.arange(len(lengths))
    if policy == "drop":
        documents = documents[lengths <= limit]
    # Rounded up: 9 tokens make 3 pieces of at most 4.
    pieces = -(-lengths // limit) if policy == "split" else np.ones_like(lengths)
    document = np.repeat(documents, np.maximum(pieces[documents], 1))
    # The number of each piece in its document: for documents [0, 1, 1, 1, 2] it is [0, 0, 1, 2, 0].
    number = np.arange(len(document)) - np.searchsorted(document, document)
    start = number * limit
    return Spans(document, start, np.minimum(start + limit, lengths[document]))


def _wrap(lengths: np.ndarray, trained: TrainedTokens, limit: int) -> Spans:
    """Join the trained documents end to end, and cut them at every multiple of `limit` tokens."""
    every = np.arange(len(lengths))
    # Documents without a trained token are left out before rows are cut, or they would take up space in rows.
    whole = Spans(every, np.zeros_like(every), lengths)
    documents = every[_trained_in(whole, lengths, trained) > 0]
    ends = np.cumsum(lengths[documents])
    total = int(ends[-1]) if len(ends) else 0
    # For lengths [5, 3] and rows of 4: ends [5, 8], cuts [4, 5, 8], starts [0, 4, 5], which documents [0, 0, 1] own.
    cuts = np.union1d(ends, np.arange(limit, total, limit))
    starts = np.concatenate([[0], cuts[:-1]]).astype(np.int64)[: len(cuts)]
    owner = np.searchsorted(ends, starts, side="right")
    first = (ends - lengths[documents])[owner]
    return Spans(documents[owner], starts - first, cuts.astype(np.int64) - first)


def _trained_in(spans: Spans, lengths: np.ndarray, trained: TrainedTokens) -> np.ndarray:
    """Count the trained tokens of each span, without its first token."""
    return _labelled_in(spans._replace(start=np.minimum(spans.start + 1, spans.stop)), lengths, trained)


def _labelled_in(spans: Spans, lengths: np.ndarray, trained: TrainedTokens) -> np.ndarray:
    """Count the tokens of each span that have a label."""
    # The start of each span's document in the flat array.
    offset = (np.cumsum(lengths) - lengths)[spans.document]
    return trained.before(offset + spans.stop) - trained.before(offset + spans.start)


class TrainedTokens:
    """Labelled tokens of documents that lie end to end, as runs: a few numbers for each document, however long it is.

    `starts` and `stops` are the first token of each run and the token after its last, int64, ascending, `(R,)`.
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray) -> None:
        self.starts, self.sizes = starts, stops - starts
        self.earlier = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def from_masks(cls, masks: Iterable[np.ndarray]) -> TrainedTokens:
        """Make runs from bool arrays, one for each part of the dataset; only one needs to be in memory at a time."""
        offset, edges = 0, [np.zeros((0, 2), dtype=np.int64)]
        for mask in masks:
            # [0, 1, 1, 0, 1] changes at 1, 3, 4 and, framed by zeros, at 5: runs [1, 3) and [4, 5).
            framed = np.concatenate([[False], np.asarray(mask, dtype=bool), [False]])
            edges.append(np.flatnonzero(framed[1:] != framed[:-1]).reshape(-1, 2) + offset)
            offset += len(mask)
        runs = np.concatenate(edges)
        return cls(runs[:, 0], runs[:, 1])

    @classmethod
    def every(cls, tokens: int) -> TrainedTokens:
        """Make runs that label all of this many tokens."""
        return cls(np.zeros(1, dtype=np.int64), np.full(1, tokens, dtype=np.int64))

    def before(self, positions: np.ndarray) -> np.ndarray:
        """Count the labelled tokens before each of these positions; int64, in the shape of the positions."""
        if not len(self.starts):
            return np.zeros_like(positions)
        # With runs [1, 3) and [4, 5), before position 5 are 2 tokens of earlier runs and 1 of its own run; before
        # position 0 there is no run (-1).
        run = np.searchsorted(self.starts, positions, side="right") - 1
        inside = np.clip(positions - self.starts[run], 0, self.sizes[run])
        return np.where(run < 0, 0, self.earlier[run] + inside)


@dataclass(frozen=True)
class Strategy:
    """One way to make batches of documents."""

    name: str  # the `packing_strategy` that chooses it; `"padded"` is TRL without packing
    packs: bool = True  # whether documents share rows
    recuts_steps: bool = False  # whether the documents of an optimizer step are cut anew into micro-batches
    # Whether rows of `max_length` tokens are filled over the whole dataset. An optimizer step then holds other
    # documents than in the padded run.
    fills_rows: bool = False
    overflow: str | None = None  # its policy for documents longer than `max_length`; by default the user's

    @property
    def wraps(self) -> bool:
        """True if documents are cut wherever a row is full."""
        return self.overflow == WRAP

    def __str__(self) -> str:
        return self.name


PADDED = Strategy("padded", packs=False, overflow="truncate")
STEP = Strategy("step", recuts_steps=True)
MINIBATCH = Strategy("minibatch")
BFD = Strategy("bfd", fills_rows=True)
BFD_SPLIT = Strategy("bfd_split", fills_rows=True, overflow="split")
WRAPPED = Strategy("wrapped", fills_rows=True, overflow=WRAP)

# By `packing_strategy`.
STRATEGIES = {strategy.name: strategy for strategy in (STEP, MINIBATCH, BFD, BFD_SPLIT, WRAPPED)}
