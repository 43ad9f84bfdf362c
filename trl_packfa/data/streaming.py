"""Packing of streams: read them pass after pass, pack through a bounded buffer, deal to ranks, resume by position.

A stream's length is not known, so passes follow each other without a short step in between. Every rank always has a
micro-batch, no document is left out or seen twice in a pass, and a run resumes by counting. An epoch of the Trainer
ends with the step that has read the last document of a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import TrainingArguments

from ..errors import InvalidDataset
from ..packing import pack_buffer
from .batching import Batching
from .collator import LOSSES
from .dataset import count_computed
from .steps import loader_options

Document = dict[str, Any]
MicroBatch = list[Document]
# Number of documents that best fit packs together, like TRL's own window. It is more if two rounds of rows hold more.
STREAM_WINDOW = 1000
# The position at the beginning of a stream.
_BEGINNING = {"pass": 0, "source": None, "carry": [], "window": 0, "rounds": 0, "yielded": 0, "passes": 0}
# A placeholder for each micro-batch that a resumed run skips.
_SKIPPED: MicroBatch = [{"input_ids": [0, 0], "labels": [-100, -100]}]


class PackedStream(TorchIterableDataset):
    """An endless stream of this rank's micro-batches, each a list of documents.

    Every rank reads the same documents and takes its own. If the stream's shards divide evenly over ranks and
    documents are not packed into rows, a rank reads its own shards only, as accelerate deals them. Loader workers
    share the shards.

    `source` has tokenized, cut documents. By the strategy of `batching`, a micro-batch has documents in the stream's
    order, or rows of `max_length` tokens: these are filled in that order, with documents cut where a row is full, or
    by best fit, which has `window` documents in its buffer. `passes` are those whose last document is in what was
    yielded.
    """

    def __init__(
        self, source: IterableDataset, batching: Batching, *, rank: int = 0, window: int = STREAM_WINDOW
    ) -> None:
        world_size = batching.world_size
        if not batching.strategy.fills_rows and world_size > 1 and source.num_shards % world_size == 0:
            # Then no rank reads another's documents. (Rows need one common buffer, which every rank fills in the same
            # way.)
            source, rank = source.shard(num_shards=world_size, index=rank), 0
            batching = replace(batching, world_size=1)
        self.source, self.batching, self.rank, self.window = source, batching, rank, window
        self.is_sharded = batching.world_size != world_size
        self._start: dict[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self.passes = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        start = self._start or _BEGINNING
        self._pass, self.passes = start["pass"], start["passes"]
        if get_worker_info() is not None:
            self.source = _with_own_epoch(self.source)
        yielded = start["yielded"]
        # The Trainer skips as many batches as were trained, so yield placeholders, which cost nothing.
        yield from (_SKIPPED for _ in range(yielded))
        documents = _Peekable(self._documents(start["source"]))
        carry, window, done = start["carry"], start["window"], start["rounds"]
        position, passes = start["source"], start["pass"]  # `datasets` has no state before the first example
        while True:
            # The position where the window begins. A resumed run fills and packs the window again, and skips its first
            # `rounds`.
            mark = {"pass": passes, "source": position, "carry": carry, "window": window}
            rounds, carry = self._rounds(documents, carry, window)
            if not rounds:
                return  # a worker without a shard
            position, passes = self.source.state_dict(), self._pass
            documents.peek()  # moves on to the next pass if this one is over
            for number, round_ in enumerate(rounds[done:], start=done + 1):
                yielded += 1
                self.passes = self._pass if number == len(rounds) else self.passes
                self._state = {**mark, "rounds": number, "yielded": yielded, "passes": self.passes}
                yield round_[self.rank]
            window, done = window + 1, 0

    def _documents(self, state: dict[str, Any] | None) -> Iterator[Document]:
        """Yield the documents of one pass after the other; the first pass starts at `state`."""
        self.source.set_epoch(self._pass)
        self.source.load_state_dict(state)  # type: ignore[arg-type]  # None means from the beginning
        found = state is not None
        while True:
            for document in self.source:
                found = True
                yield document
            # A whole pass had no document, so later ones would have none either.
            if not found:
                if get_worker_info() is not None:
                    return
                raise InvalidDataset(
                    "the training stream has no document to train on.",
                    why=["each was empty, dropped by overflow='drop', or had no label within max_length"],
                    do="Check the stream's filters, max_length, completion_only_loss and assistant_only_loss.",
                )
            self._pass, found = self._pass + 1, False
            self.source.set_epoch(self._pass)

    def _rounds(
        self, documents: Iterator[Document], carry: list[Any], window: int
    ) -> tuple[list[list[MicroBatch]], list[Any]]:
        """Return the next rounds of all ranks, and the documents that wait, with how often each has waited."""
        batching = self.batching
        capacity, size, world_size = batching.max_length, batching.batch_size, batching.world_size
        if not batching.strategy.fills_rows:
            batches = [list(islice(documents, size)) for _ in range(world_size)]
            # The source is endless, so the last rank's micro-batch is empty only if this worker has no shard.
            return ([batches] if batches[-1] else []), []
        assert capacity is not None, "the config requires max_length for rows"
        if batching.strategy.wraps:
            return _wrap_round(documents, carry, capacity, size, world_size)
        buffer = _fill(documents, carry, at_least=self.window, tokens=2 * size * world_size * capacity)
        if not buffer:
            return [], []
        packed = pack_buffer(
            np.array([count_computed(document) for document, _ in buffer]),
            np.array([waited for _, waited in buffer]),
            capacity=capacity,
            rows_per_batch=size,
            world_size=world_size,
            quadratic=batching.quadratic,
            rng=np.random.default_rng([batching.seed, window]),
        )
        rounds = [
            [[buffer[i][0] for row in rows[at : at + size] for i in row] for at in range(0, size * world_size, size)]
            for rows in packed.rounds
        ]
        return rounds, [[buffer[i][0], buffer[i][1] + 1] for i in packed.carried]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last micro-batch that was yielded, as plain values for JSON."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Let the next iteration continue from `state`, after a placeholder for each micro-batch that was yielded."""
        self._start = dict(state) if state else None


def _with_own_epoch(source: IterableDataset) -> IterableDataset:
    """Copy a stream and give the copy an epoch of its own, which other loader workers do not share.

    If one worker moved a shared one on, another would start its shards anew: documents were left out or seen twice.
    """
    source = copy.copy(source)
    if isinstance(getattr(source, "_epoch", None), torch.Tensor):
        source._epoch = source._epoch.clone()  # pyright: ignore[reportAttributeAccessIssue]
    return source


def _fill(documents: Iterator[Document], carry: list[Any], *, at_least: int, tokens: int) -> list[Any]:
    """Fill a buffer of `[document, times carried over]` with the carried-over documents and enough new ones."""
    buffer, held = list(carry), sum(count_computed(document) for document, _ in carry)
    while len(buffer) < at_least or held < tokens:
        document = next(documents, None)
        if document is None:
            return []
        buffer.append([document, 0])
        held += count_computed(document)
    return buffer


def _wrap_round(
    documents: Iterator[Document], carry: list[Any], capacity: int, rows: int, world_size: int
) -> tuple[list[list[MicroBatch]], list[Any]]:
    """Fill one round of rows with documents in order; the rest of a document that is cut at its end waits."""
    batches: list[MicroBatch] = [[] for _ in range(world_size)]
    rest = [document for document, _ in carry]
    for number in range(world_size * rows):
        room = capacity
        while room:
            document = rest.pop() if rest else next(documents, None)
            if document is None:
                return [], []
            head, tail = _cut_at(document, room)
            batches[number // rows].append(head)
            room -= len(head["input_ids"])
            rest += [tail] if tail["input_ids"] else []
    return [batches], [[document, 0] for document in rest]


def _cut_at(document: Document, tokens: int) -> tuple[Document, Document]:
    columns = [column for column in ("input_ids", "labels") if column in document]
    head, tail = (
        {column: document[column][part] for column in columns} for part in (slice(tokens), slice(tokens, None))
    )
    rest = {**document, **tail}
    if LOSSES in document:  # the head counts what the document has lost
        rest[LOSSES] = [0] * len(document[LOSSES])
    return {**document, **head}, rest


class _Peekable(Iterator[Document]):
    """An iterator that can look at what comes next. An error of a look is raised when it is asked for."""

    def __init__(self, documents: Iterator[Document]) -> None:
        self.documents = documents
        self._next: list[Callable[[], Document]] = []

    def __next__(self) -> Document:
        return self._next.pop()() if self._next else next(self.documents)

    def peek(self) -> None:
        """Read the next document, if it is not read yet."""
        if self._next:
            return
        try:
            document = next(self.documents)
            self._next = [lambda: document]
        except Exception as error:
            self._next = [partial(_raise, error)]


def _raise(error: Exception) -> Document:
    raise error


class _Collated(TorchIterableDataset):
    """Collated micro-batches of a stream, each after the number of the loader's worker and of passes that are over."""

    def __init__(self, stream: PackedStream, collator: Callable[[MicroBatch], Any]) -> None:
        self.stream, self.collator = stream, collator

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        info = get_worker_info()
        for documents in self.stream:
            yield 0 if info is None else info.id, self.stream.passes, self.collator(documents)


class StreamBatches(TorchIterableDataset):
    """The collated micro-batches of a stream, which loader workers make. An iteration of it is an epoch.

    An iteration starts anew, unless [`~StreamBatches.end_epoch`] was called. Then it goes on where the last one was.
    """

    def __init__(self, stream: PackedStream, collator: Callable[[MicroBatch], Any], args: TrainingArguments) -> None:
        self.stream = stream
        options = loader_options(args)
        # With a generator of its own, so that random numbers are drawn as often as by one loader.
        options["generator"] = torch.Generator().manual_seed(args.seed)
        self.loader = DataLoader(_Collated(stream, collator), batch_size=None, collate_fn=as_it_is, **options)
        self._readers = max(min(args.dataloader_num_workers, stream.source.num_shards), 1)
        self._by_reader: dict[int, int] = {}
        self._running: Iterator[Any] | None = None
        self._continues: Iterator[Any] | None = None

    @property
    def passes(self) -> int:
        """The number of passes whose last document has been yielded, by every worker that reads."""
        return min(self._by_reader.values()) if len(self._by_reader) == self._readers else 0

    def __iter__(self) -> Iterator[Any]:
        self._running, self._continues = iter(self.loader) if self._continues is None else self._continues, None
        for reader, passes, batch in self._running:
            self._by_reader[reader] = passes
            yield batch

    def end_epoch(self) -> None:
        """Let the next iteration go on with the next pass."""
        self._continues = self._running


def as_it_is(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def resumes_by_state(source: IterableDataset) -> bool:
    """Tell whether a stream can resume from its own state, which does not hold the contents of a shuffle buffer.

    The parts of the stream are inspected; an unseen part counts.
    """
    parts = [getattr(source, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if part is None or "Shuffle" in type(part).__name__:
            return False
        inner = getattr(part, "ex_iterable", None)
        parts += [inner] if inner is not None else list(getattr(part, "ex_iterables", []))
    return True
