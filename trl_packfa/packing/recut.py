"""The examples of one optimizer step, cut into as few and as equal micro-batches as a token budget allows.

The cost of a micro-batch is `sum(L) + quadratic * sum(L^2)` over its documents: matrix products grow with the
tokens, attention with the squares of the documents' lengths.
"""

from __future__ import annotations

import heapq

import numpy as np

from .best_fit import best_fit_decreasing


def fewest_micro_batches(lengths: np.ndarray, budget: int) -> int:
    """How many micro-batches of at most `budget` tokens these documents need.

    A document longer than the budget is a micro-batch of its own.
    """
    return len(_within_budget(np.asarray(lengths), budget))


def recut(lengths: np.ndarray, *, budget: int, num_micro_batches: int, quadratic: float = 0.0) -> list[list[int]]:
    """Deal documents of `lengths` (tokens) to micro-batches, level in cost, none above `budget` tokens.

    `num_micro_batches` is at least [`fewest_micro_batches`] and at most the number of documents. Returns document
    indices, each list in the documents' own order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert fewest_micro_batches(lengths, budget) <= num_micro_batches <= len(lengths), "infeasible cut"
    cost = lengths + quadratic * lengths.astype(np.float64) ** 2
    parts = _longest_first(cost, num_micro_batches)
    longest = max(budget, int(lengths.max()))
    if any(lengths[part].sum() > longest for part in parts):
        # Level in cost, but too full: best fit is not as level, but fits.
        parts = [part.tolist() for part in _within_budget(lengths, budget)]
        while len(parts) < num_micro_batches:
            widest = max(range(len(parts)), key=lambda i: len(parts[i]))
            documents = parts.pop(widest)
            parts += [[documents[i] for i in half] for half in _longest_first(cost[documents], 2)]
    return [sorted(part) for part in parts]


def _within_budget(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    own = np.flatnonzero(lengths > budget)
    shared = np.flatnonzero(lengths <= budget)
    # Which of the documents of equal length goes where does not matter here: always the same draw.
    bins = best_fit_decreasing(lengths[shared], budget, np.random.default_rng(0))
    return [shared[documents] for documents in bins] + [own[i : i + 1] for i in range(len(own))]


def _longest_first(cost: np.ndarray, parts: int) -> list[list[int]]:
    """Graham's rule: the costliest first, each to the part that has the least."""
    heap = [(0.0, i) for i in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for document in np.argsort(-cost, kind="stable").tolist():
        total, part = heapq.heappop(heap)
        dealt[part].append(document)
        heapq.heappush(heap, (total + float(cost[document]), part))
    return dealt
