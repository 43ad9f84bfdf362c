"""Cut the examples of one optimizer step into micro-batches: as few and as equal as a token budget allows.

The cost of a micro-batch is `sum(L) + quadratic * sum(L^2)` over its documents. Matrix products grow with the number
of tokens, attention grows with the square of each document's length.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

import numpy as np

from .best_fit import best_fit_decreasing

# The most exchanges that are tried, and the number of cheapest parts whose documents are tried. A step's few hundred
# documents are level long before. Parts count as level if the costliest is within a thousandth of the mean, or is as
# cheap as the longest document allows.
_EXCHANGES, _OTHERS = 200, 32
_LEVEL = 1.001


def fewest_micro_batches(lengths: np.ndarray, budget: int) -> int:
    """Return the number of micro-batches of at most `budget` tokens that these documents need.

    A document longer than the budget is a micro-batch of its own.
    """
    return len(_within_budget(np.asarray(lengths), budget))


def document_cost(lengths: np.ndarray, quadratic: float) -> np.ndarray:
    """Return the cost of each document in units of the cost of a token; `quadratic` is that of attending to one."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths + quadratic * lengths**2


def recut(
    lengths: np.ndarray, *, budget: int, num_micro_batches: int, quadratic: float = 0.0, cost: np.ndarray | None = None
) -> list[list[int]]:
    """Cut documents of `lengths` (tokens) into micro-batches of equal cost, none above `budget` tokens.

    `num_micro_batches` is at least [`fewest_micro_batches`] and at most the number of documents. A document longer
    than the budget is alone. `cost` is that of each document if its length does not say it. Returns document indices,
    each list in the documents' own order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    cost = document_cost(lengths, quadratic) if cost is None else cost
    parts = _cut(lengths, cost, budget, num_micro_batches)
    assert parts is not None, f"infeasible: {len(lengths)} documents, {num_micro_batches} micro-batches"
    return parts


def _cut(lengths: np.ndarray, cost: np.ndarray, budget: int, count: int) -> list[list[int]] | None:
    """Cut documents into `count` parts within the budget; return `None` if best fit needs more."""
    if count > len(lengths):
        return None
    parts = _level(longest_first(cost, count), cost, lengths, budget)
    if any((sums_of(parts, lengths) > budget) & (np.array([len(part) for part in parts]) > 1)):
        # The parts are level in cost, but one is too full. Best fit is less level, but fits.
        parts = [part.tolist() for part in _within_budget(lengths, budget)]
        if len(parts) > count:
            return None
        while len(parts) < count:
            widest = max(range(len(parts)), key=lambda i: len(parts[i]))
            documents = parts.pop(widest)
            parts += [[documents[i] for i in half] for half in longest_first(cost[documents], 2)]
        parts = _level(parts, cost, lengths, budget)
    return [sorted(part) for part in parts]


def recut_over_ranks(
    lengths: np.ndarray, *, budget: int, world_size: int, quadratic: float = 0.0, groups: np.ndarray | None = None
) -> list[list[list[int]]]:
    """Cut documents of `lengths` (tokens) into micro-batches for several ranks, level in each round and in total.

    Returns for each rank its micro-batches of document indices. All ranks have the same number of them: a rank that
    needs fewer gets empty ones at the end.

    With `groups`, the number of each document's group, all documents of a group run in the same round, on any of the
    ranks. No group may be longer than the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    cost = document_cost(lengths, quadratic)
    if groups is None:
        return _dealt(_rounds(lengths, cost, budget, world_size), cost)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    tokens, costs = (np.array([of[documents].sum() for documents in members]) for of in (lengths, cost))
    # A group counts as one document, with the length and cost of its members together.
    rounds = [
        [[document for group in part for document in members[group].tolist()] for part in parts]
        for parts in _rounds(tokens, costs, budget, world_size)
    ]
    return _dealt([_spread(parts, lengths, cost, budget) for parts in rounds], cost)


def _rounds(lengths: np.ndarray, cost: np.ndarray, budget: int, world_size: int) -> list[list[list[int]]]:
    """Return the parts that run at the same time, one for each rank, of similar cost; the costliest round first."""
    # If 2 ranks need at least 5 micro-batches, there are 3 rounds of 2. Cut into 6 parts, so that no rank is idle. The
    # tokens alone tell the least number; where no cut into so few is found, best fit tells one that there is.
    rounds = -(-int(lengths.sum()) // (budget * world_size))
    parts = _cut(lengths, cost, budget, min(rounds * world_size, len(lengths)))
    if parts is None:
        rounds = -(-fewest_micro_batches(lengths, budget) // world_size)
        parts = recut(lengths, budget=budget, num_micro_batches=min(rounds * world_size, len(lengths)), cost=cost)
    parts = _costliest_first(parts, cost) + [[]] * (rounds * world_size - len(parts))
    return [parts[start : start + world_size] for start in range(0, len(parts), world_size)]


def _spread(parts: list[list[int]], lengths: np.ndarray, cost: np.ndarray, budget: int) -> list[list[int]]:
    """Level a round's documents over the same number of parts if they fit, each in the documents' own order."""
    documents = np.sort(np.concatenate([np.array(part, dtype=np.int64) for part in parts]))
    wanted = min(len(parts), len(documents))
    if len(parts) == 1 or fewest_micro_batches(lengths[documents], budget) > wanted:
        return [sorted(part) for part in parts]
    levelled = recut(lengths[documents], budget=budget, num_micro_batches=wanted, cost=cost[documents])
    return [documents[part].tolist() for part in levelled] + [[]] * (len(parts) - wanted)


def _dealt(rounds: list[list[list[int]]], cost: np.ndarray) -> list[list[list[int]]]:
    """Return for each rank its parts: in every round the rank with the least cost so far gets the costliest part."""
    dealt: list[list[list[int]]] = [[] for _ in rounds[0]]
    done = np.zeros(len(dealt))
    for parts in rounds:
        ranks, costliest = np.argsort(done, kind="stable"), _costliest_first(parts, cost)
        for rank, part in zip(ranks.tolist(), costliest, strict=True):
            dealt[rank].append(part)
        done[ranks] += sums_of(costliest, cost)
    return dealt


def _costliest_first(parts: list[list[int]], cost: np.ndarray) -> list[list[int]]:
    return [parts[i] for i in np.argsort(-sums_of(parts, cost), kind="stable")]


def sums_of(parts: Sequence[Sequence[int]], values: np.ndarray) -> np.ndarray:
    """Return the sum of `values` over the documents of each part; 0 for an empty one."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    documents = np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=len(owner))
    return np.bincount(owner, weights=values[documents], minlength=len(parts)).astype(values.dtype)


def imbalance(dealt: list[list[list[int]]], lengths: np.ndarray, quadratic: float = 0.0) -> float:
    """Return the time of a step relative to ranks that are always busy, at least 1.

    Ranks wait for each other in every round of micro-batches. `dealt` are the documents of each rank's micro-batches,
    as [`recut_over_ranks`] returns them, `lengths` the tokens of each document, `quadratic` as in [`document_cost`].
    """
    cost = document_cost(lengths, quadratic)
    # With costs [[4, 2], [2, 2]] of 2 ranks in 2 rounds, a step takes 4 + 2, and 3 + 2 if all were busy: 1.2.
    costs = np.stack([sums_of(rank, cost) for rank in dealt])
    return float(costs.max(axis=0).sum() / costs.mean(axis=0).sum())


def _within_budget(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    own = np.flatnonzero(lengths > budget)
    shared = np.flatnonzero(lengths <= budget)
    # The order of documents of equal length does not matter here, so the seed is fixed.
    bins = best_fit_decreasing(lengths[shared], budget, np.random.default_rng(0))
    return [shared[documents] for documents in bins] + [own[i : i + 1] for i in range(len(own))]


def longest_first(cost: np.ndarray, parts: int, *, most: int | None = None) -> list[list[int]]:
    """Deal documents longest processing time first (Graham, 1969): the costliest left goes to the cheapest part.

    `most` is the largest number of documents of a part.
    """
    heap = [(0.0, i) for i in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    order = np.argsort(-cost, kind="stable")
    for document, more in zip(order.tolist(), cost[order].tolist(), strict=True):
        total, part = heap[0]
        dealt[part].append(document)
        if len(dealt[part]) == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + more, part))
    return dealt


def _level(parts: list[list[int]], cost: np.ndarray, lengths: np.ndarray, limit: int) -> list[list[int]]:
    """Exchange documents between the costliest part and the cheapest ones, as long as it gets cheaper and all fit.

    Each time it is the exchange after which the costlier of the two parts is cheapest.
    """
    totals, tokens = sums_of(parts, cost), sums_of(parts, lengths)
    # No exchange makes the costliest part cheaper than the costliest document.
    reachable = max(totals.mean() * _LEVEL, cost.max())
    for _ in range(_EXCHANGES if len(parts) > 1 else 0):
        top = int(totals.argmax())
        if totals[top] <= reachable:
            break
        # One column for each document that may come back, and one for none (-1). For parts [[0, 1], [2]] and top 0,
        # part_of is [1, 1] and comes is [2, -1].
        others = range(len(parts))
        if len(parts) > _OTHERS + 1:
            others = np.sort(np.argpartition(totals, _OTHERS)[:_OTHERS]).tolist()
        others = [i for i in others if i != top]
        part_of = np.repeat(others, [len(parts[i]) + 1 for i in others])
        comes = np.concatenate([[*parts[i], -1] for i in others]).astype(np.int64)
        leaves = np.array(parts[top])
        # moved[i, j] is the cost that moves if document i of the costliest part is exchanged for document j.
        moved = cost[leaves][:, None] - np.where(comes >= 0, cost[comes], 0.0)
        moved_tokens = lengths[leaves][:, None] - np.where(comes >= 0, lengths[comes], 0)
        worse = np.maximum(totals[top] - moved, totals[part_of] + moved)
        full = (tokens[part_of] + moved_tokens > limit) | (tokens[top] - moved_tokens > limit)
        # Every part keeps at least one document, or there would be fewer micro-batches than planned.
        worse = np.where(full | ((comes < 0) & (len(leaves) == 1)), np.inf, worse)
        i, j = np.unravel_index(int(worse.argmin()), worse.shape)
        # The gain must exceed rounding of sums, or two equal documents would be exchanged back and forth.
        if not worse[i, j] < totals[top] * (1 - 1e-9):
            break
        other, out, back = int(part_of[j]), int(leaves[i]), int(comes[j])
        parts[top].remove(out)
        parts[other].append(out)
        if back >= 0:
            parts[other].remove(back)
            parts[top].append(back)
        for part in (top, other):
            totals[part], tokens[part] = cost[parts[part]].sum(), lengths[parts[part]].sum()
    return parts
