"""Best-fit decreasing: documents into as few bins as possible, by index.

Each document, longest first, goes into the fullest bin that still has room; within 11/9 of the optimum
(Johnson, 1973). Documents of one length are placed together: a bin with space r takes r // length of them before
another is touched, so the work is per pair of distinct length and space, not per document.
"""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Pack documents of `lengths` (tokens, all between 1 and `capacity`) into bins of `capacity` tokens.

    `rng` decides which of the documents of equal length goes where: another draw mixes them anew, into the same
    number of bins. Returns one int64 array of document indices per bin.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    assert lengths.min() >= 1 and lengths.max() <= capacity, "lengths outside 1..capacity"
    shuffled = rng.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    # For lengths [3, 5, 3], unshuffled: order [1, 0, 2], distinct [-5, -3], starts [0, 1].
    distinct, starts = np.unique(-lengths[order], return_index=True)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    spaces = _OpenBins(capacity)
    for length, documents in zip(-distinct, np.split(order, starts[1:]), strict=True):
        bin_of[documents] = spaces.place(int(length), len(documents))
    # For bin_of [0, 1, 0]: by_bin [0, 2, 1], cut where the number changes: [[0, 2], [1]].
    by_bin = np.argsort(bin_of, kind="stable")
    return np.split(by_bin, np.flatnonzero(np.diff(bin_of[by_bin])) + 1)


class _OpenBins:
    """Bins by the space they have left."""

    def __init__(self, capacity: int) -> None:
        # `count[s]` bins have s tokens left, `stacks[s]` holds their numbers: one numpy call over the counts finds all
        # spaces that a length fits, without a look at single bins.
        self.capacity, self.num_bins = capacity, 0
        self.stacks: dict[int, list[np.ndarray]] = {}
        self.count = np.zeros(capacity + 1, dtype=np.int64)

    def place(self, length: int, documents: int) -> np.ndarray:
        """Place so many documents of one length; returns the bin of each."""
        placed = []
        # The smallest space first, which is the fullest bin. Length 3 and bins with 4 and 7 tokens left: the one takes
        # one document, the other two.
        for space in (np.flatnonzero(self.count[length:]) + length).tolist():
            if documents == 0:
                break
            # -(-a // b) is a / b rounded up: as many bins as these documents fill.
            bins = self._take(space, -(-documents // (space // length)))
            placed.append(self._fill(bins, space, length, documents))
            documents -= len(placed[-1])
        if documents:
            fresh = np.arange(self.num_bins, self.num_bins - (-documents // (self.capacity // length)))
            self.num_bins += len(fresh)
            placed.append(self._fill(fresh, self.capacity, length, documents))
        return np.concatenate(placed)

    def _fill(self, bins: np.ndarray, space: int, length: int, documents: int) -> np.ndarray:
        """Put documents into these bins, each to the brim but perhaps the last, and file the bins anew."""
        each = space // length
        # Bins [4, 5] that take 2 each, 3 documents: [4, 4, 5], one of them in the last.
        where = np.repeat(bins, each)[:documents]
        in_last = len(where) - each * (len(bins) - 1)
        self._file(bins[:-1], space - each * length)
        self._file(bins[-1:], space - in_last * length)
        return where

    def _take(self, space: int, at_most: int) -> np.ndarray:
        stack = self.stacks.pop(space)
        bins = stack[0] if len(stack) == 1 else np.concatenate(stack)
        self.count[space] = 0
        self._file(bins[at_most:], space)
        return bins[:at_most]

    def _file(self, bins: np.ndarray, space: int) -> None:
        if len(bins):
            self.stacks.setdefault(space, []).append(bins)
            self.count[space] += len(bins)
