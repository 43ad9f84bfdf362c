"""Which tokens of a dataset have a label, as runs: a few numbers a document, however many tokens there are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class TrainedTokens:
    """Labelled tokens of documents laid one after the other, as runs of neighbours.

    Args:
        starts (`np.ndarray`), stops (`np.ndarray`):
            First token of each run and the one after its last, int64, ascending, shape `(R,)`.
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray) -> None:
        self.starts, self.sizes = starts, stops - starts
        self.earlier = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def from_masks(cls, masks: Iterable[np.ndarray]) -> TrainedTokens:
        """From bool arrays, one for each stretch of the dataset; no two need to be in memory together."""
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
        """All of so many tokens."""
        return cls(np.zeros(1, dtype=np.int64), np.full(1, tokens, dtype=np.int64))

    def before(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens before each of these positions have a label, int64, of the positions' shape."""
        if not len(self.starts):
            return np.zeros_like(positions)
        # Runs [1, 3) and [4, 5): before 5 are 2 tokens of earlier runs and 1 of its own, before 0 there is no run
        # (-1).
        run = np.searchsorted(self.starts, positions, side="right") - 1
        inside = np.clip(positions - self.starts[run], 0, self.sizes[run])
        return np.where(run < 0, 0, self.earlier[run] + inside)
