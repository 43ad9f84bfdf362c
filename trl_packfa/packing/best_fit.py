"""Best-fit decreasing: pack documents into as few bins as possible, by index.

Each document, the longest first, goes into the fullest bin that still has room. The number of bins is within 11/9 of
the optimum (Johnson, 1973). Documents of one length are placed together: a bin with space r takes r // length of them
before the next bin is used. So the work grows with the pairs of distinct lengths and spaces, not with the documents.
"""

from __future__ import annotations

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Pack documents of `lengths` (tokens, all between 1 and `capacity`) into bins of `capacity` tokens.

    `rng` decides which of the documents of equal length goes where: another draw gives other bins, but the same number
    of them. Returns one int64 array of document indices for each bin.
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
    """Bins, grouped by the space that they have left."""

    def __init__(self, capacity: int) -> None:
        # `count[s]` bins have s tokens left, and `stacks[s]` holds their numbers. One numpy call over the counts finds
        # all spaces that fit a length, without reading single bins.
        self.capacity, self.num_bins = capacity, 0
        self.stacks: dict[int, list[np.ndarray]] = {}
        self.count = np.zeros(capacity + 1, dtype=np.int64)

    def place(self, length: int, documents: int) -> np.ndarray:
        """Place this many documents of one length; return the bin of each."""
        placed = []
        # The smallest space first: that is the fullest bin. With length 3 and bins with 4 and 7 tokens left, the first
        # takes one document, the second two.
        for space in (np.flatnonzero(self.count[length:]) + length).tolist():
            if documents == 0:
                break
            # -(-a // b) is a / b rounded up: the number of bins that these documents fill.
            bins = self._take(space, -(-documents // (space // length)))
            placed.append(self._fill(bins, space, length, documents))
            documents -= len(placed[-1])
        if documents:
            fresh = np.arange(self.num_bins, self.num_bins - (-documents // (self.capacity // length)))
            self.num_bins += len(fresh)
            placed.append(self._fill(fresh, self.capacity, length, documents))
        return np.concatenate(placed)

    def _fill(self, bins: np.ndarray, space: int, length: int, documents: int) -> np.ndarray:
        """Put documents into these bins, fill all but perhaps the last, and file the bins by the space left."""
        each = space // length
        # Bins [4, 5] take 2 documents each. For 3 documents the result is [4, 4, 5], with one in the last bin.
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
