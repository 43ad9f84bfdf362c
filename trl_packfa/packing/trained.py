"""The labelled tokens of a dataset, stored as runs: a few numbers for each document, however long it is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class TrainedTokens:
    """Labelled tokens of documents that lie end to end, as runs of consecutive tokens.

    Args:
        starts (`np.ndarray`), stops (`np.ndarray`):
            First token of each run and the token after its last, int64, ascending, shape `(R,)`.
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray) -> None:
        self.starts, self.sizes = starts, stops - starts
        self.earlier = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def from_masks(cls, masks: Iterable[np.ndarray]) -> TrainedTokens:
        """Make runs from bool arrays, one for each part of the dataset; only one array needs to be in memory at a
        time."""
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
