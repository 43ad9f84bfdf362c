"""Rows that are filled over the whole dataset or a stream's buffer, in rounds of about equal cost for all ranks.

A dataset's plan depends only on lengths, seed, epoch and rank. Every rank computes its own part of the same plan, and
all ranks have the same number of batches. Each epoch mixes documents of equal length anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from .best_fit import best_fit_decreasing
from .microbatches import document_cost, longest_first


def consecutive_rows(lengths: np.ndarray, capacity: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return rows of consecutive documents, which were cut before at the ends of rows ([`plan_overflow`])."""
    # For lengths [4, 1, 3] and rows of 4, the documents' last tokens are 3, 4 and 7, in rows 0, 1 and 1. So the rows
    # hold the documents [0] and [1, 2].
    row_of = (np.cumsum(lengths) - 1) // capacity
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(row_of)) + 1)


@dataclass(eq=False)
class PackedBatchSampler:
    """A batch sampler that yields the documents of one micro-batch at a time, for one rank.

    `quadratic` is as in [`document_cost`]: rows of similar cost run at the same time on all ranks.
    """

    lengths: np.ndarray  # tokens of each document, all between 1 and `capacity`
    _: KW_ONLY
    capacity: int  # tokens of a row, TRL's `max_length`
    rows_per_batch: int  # rows of a micro-batch, `per_device_train_batch_size`
    seed: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True  # draws the order of rows
    wrapped: bool = False  # rows of consecutive documents, which were cut to fill them, instead of best fit
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        self.pack = consecutive_rows if self.wrapped else best_fit_decreasing
        self.cost = document_cost(self.lengths, self.quadratic)
        self.epoch = 0
        # The number of bins depends on the lengths only, not on the random mix.
        self.num_rows = len(self.pack(self.lengths, self.capacity, np.random.default_rng(self.seed)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration packs."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_rows // (self.rows_per_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for round_ in self.rounds():
            yield self.share(round_, self.rank)

    def rounds(self) -> list[list[np.ndarray]]:
        """Return the rows that all ranks run at the same time, round by round; `share` deals them."""
        # The random numbers depend on seed and epoch alone, so all ranks and a resumed run draw the same.
        rng = np.random.default_rng([self.seed, self.epoch])
        rows = self.pack(self.lengths, self.capacity, rng)
        if self.shuffle:
            rows = [rows[i] for i in rng.permutation(len(rows))]
        sizes = {"rows_per_batch": self.rows_per_batch, "world_size": self.world_size}
        return levelled_rounds(rows, self.cost, **sizes, rng=rng, shuffle=self.shuffle)

    def share(self, rows: list[np.ndarray], rank: int) -> list[int]:
        """Return a rank's documents of one round; rows of a last round with fewer than ranks are cut in halves."""
        rows = list(rows)
        while len(rows) < self.world_size:
            largest = max(range(len(rows)), key=lambda i: len(rows[i]))
            documents = rows.pop(largest)
            half = len(documents) // 2
            # Every rank must take part in the step, so a single document is repeated, as accelerate does.
            rows += [documents[:half], documents[half:]] if half else [documents, documents]
        # 3 rows on 2 ranks: row 0 for rank 0, rows 1 and 2 for rank 1.
        first, last = (len(rows) * (rank + i) // self.world_size for i in (0, 1))
        return np.concatenate(rows[first:last]).tolist()

    @property
    def fill(self) -> float:
        """Number of true tokens divided by the capacity of all rows, for the whole plan."""
        return float(self.lengths.sum()) / (self.num_rows * self.capacity)


# Rounds whose rows are sorted by cost together: enough to find similar rows, few enough to keep the order random.
_LEVELLED_ROUNDS = 128


def levelled_rounds(
    rows: list[np.ndarray],
    cost: np.ndarray,
    *,
    rows_per_batch: int,
    world_size: int,
    rng: np.random.Generator,
    shuffle: bool = True,
) -> list[list[np.ndarray]]:
    """Return the rows that all ranks run at the same time, round by round.

    With several ranks, the rows of a round have similar costs: rows are sorted by cost within some hundred rounds. A
    round's rows come rank by rank, and every rank's have about the same cost. Only the last round may have too few.

    `rows` are the document indices of each row, `cost` is that of each document, `(S,)`. `rows_per_batch` is the rows
    of one rank's micro-batch. `rng` draws the order of the rounds, unless `shuffle` is off.
    """
    per_round = rows_per_batch * world_size
    # A single rank waits for nobody, so rows keep their order.
    if world_size == 1:
        return [rows[start : start + per_round] for start in range(0, len(rows), per_round)]
    rounds: list[list[np.ndarray]] = []
    for start in range(0, len(rows), _LEVELLED_ROUNDS * per_round):
        stretch = rows[start : start + _LEVELLED_ROUNDS * per_round]
        # The incomplete round is taken off before sorting: it must be the last one, not the cheapest.
        tail = len(stretch) % per_round
        whole = sorted(stretch[: len(stretch) - tail], key=lambda row: -cost[row].sum())
        levelled = [whole[i : i + per_round] for i in range(0, len(whole), per_round)]
        for i in rng.permutation(len(levelled)) if shuffle else range(len(levelled)):
            costs = np.array([cost[row].sum() for row in levelled[i]])
            # Rows of cost 5, 4, 3, 2 for 2 ranks of 2 rows: 5 and 2 go to rank 0, 4 and 3 to rank 1.
            ranks = longest_first(costs, world_size, most=rows_per_batch)
            rounds.append([levelled[i][row] for rank in ranks for row in rank])
        rounds += [stretch[len(stretch) - tail :]] if tail else []
    return rounds


# Rows that are at least this full are not held back for a better fit.
_FULL = 0.95
# How often a document may be carried over, so that none waits long.
PATIENCE = 2


class BufferedRows(NamedTuple):
    """Rounds of rows, each an array of document indices, and the indices of the documents that are carried over."""

    rounds: list[list[np.ndarray]]
    carried: np.ndarray


def pack_buffer(
    lengths: np.ndarray,
    carried_before: np.ndarray,
    *,
    capacity: int,
    rows_per_batch: int,
    world_size: int,
    quadratic: float,
    rng: np.random.Generator,
) -> BufferedRows:
    """Pack the buffer by best-fit decreasing and send out whole rounds of the fullest rows, levelled over the ranks.

    `lengths` are the tokens of each document, `(S,)`, none above `capacity`; enough of them for two rounds.
    `carried_before` is how often each was carried over, `(S,)`; after `PATIENCE` times its row goes out first. See
    [`PackedBatchSampler`] for the others.
    """
    per_round = rows_per_batch * world_size
    rows = best_fit_decreasing(lengths, capacity, rng)
    fill = np.array([lengths[row].sum() / capacity for row in rows])
    late = np.array([carried_before[row].max() >= PATIENCE for row in rows])
    # `lexsort` sorts by its last key first: rows with a document that waited long enough come first, then the fullest.
    order = np.lexsort((-fill, ~late))
    # At most a quarter of the rows waits. Else rows that never get full would fill the buffer, with no room for new
    # documents.
    waiting = min(int(((fill < _FULL) & ~late).sum()), len(rows) // 4)
    # Whole rounds only, as every rank takes part in each round. At least one, or the stream would stop.
    out = max((len(rows) - waiting) // per_round, 1) * per_round
    sent, kept = order[:out], order[out:]
    rounds = levelled_rounds(
        [rows[i] for i in rng.permutation(sent)],
        document_cost(lengths, quadratic),
        rows_per_batch=rows_per_batch,
        world_size=world_size,
        rng=rng,
    )
    # In their order of arrival, in which a resumed run puts them into its buffer.
    carried = np.concatenate([np.zeros(0, dtype=np.int64), *(rows[i] for i in kept)])
    return BufferedRows(rounds, np.sort(carried))
