"""Pack rows from a bounded buffer of a stream's documents, and carry the remaining documents over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .balance import levelled_rounds
from .best_fit import best_fit_decreasing
from .microbatches import document_cost

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
