"""Batches of document indices, packed over the whole dataset and dealt to the ranks.

A plan depends only on lengths, seed, epoch and rank. Every rank computes its own part of the same plan, and all ranks
have the same number of batches. Each epoch mixes documents of equal length anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .best_fit import best_fit_decreasing
from .buffer import levelled_rounds
from .microbatches import document_cost


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
