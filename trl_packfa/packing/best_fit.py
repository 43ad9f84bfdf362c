"""Best-fit decreasing: pack documents into as few bins as possible, by index."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Pack documents of `lengths` (tokens, all between 1 and `capacity`) into bins of `capacity` tokens.

    Each document, the longest first, goes into the fullest bin that still has room. The number of bins is within 11/9
    of the optimum (Johnson, 1973). `rng` decides which of the documents of equal length goes where: another draw gives
    other bins, but the same number of them. Returns one ascending int64 array of document indices for each bin.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    assert lengths.min() >= 1 and lengths.max() <= capacity, "lengths outside 1..capacity"
    shuffled = rng.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    bin_of, bins = [0] * len(lengths), 0
    # The bins by the tokens that they have left, those that came first in front; and these numbers, ascending. The
    # last one stands for a new bin.
    with_space: dict[int, deque[int]] = defaultdict(deque)
    spaces = [capacity]
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fullest = bisect_left(spaces, length)
        space = spaces[fullest]
        if space == capacity:
            chosen, bins = bins, bins + 1
        else:
            chosen = with_space[space].popleft()
            if not with_space[space]:
                del spaces[fullest]
        bin_of[document] = chosen
        if left := space - length:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(chosen)
    # For bin_of [0, 1, 0]: by_bin [0, 2, 1], cut where the number changes: [[0, 2], [1]].
    by_bin = np.argsort(bin_of, kind="stable")
    return np.split(by_bin, np.flatnonzero(np.diff(np.array(bin_of)[by_bin])) + 1)
