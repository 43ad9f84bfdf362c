"""Rows from a bounded buffer of a stream's documents, and rounds of rows of about equal cost for all ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .best_fit import best_fit_decreasing
from .microbatches import document_cost, longest_first

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
