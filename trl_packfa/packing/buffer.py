"""Rows out of a bounded buffer of a stream's documents, and what is carried over to the next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .balance import levelled_rounds
from .best_fit import best_fit_decreasing
from .microbatches import document_cost

# Rows that are fuller need not wait for better company.
_FULL = 0.95
# Times that a document may be carried over: no document waits for long.
PATIENCE = 2


class BufferedRows(NamedTuple):
    """Rounds of rows, each an array of document indices; the indices of the documents that are carried over."""

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
    """Best-fit decreasing over the buffer; whole rounds of the fullest rows go out, levelled over the ranks.

    Args:
        lengths (`np.ndarray`):
            Tokens of each document in the buffer, shape `(S,)`, none above `capacity`; enough of them for two rounds.
        carried_before (`np.ndarray`):
            How often each was carried over already, shape `(S,)`: after `PATIENCE` times its row goes out first.
        capacity (`int`):
            Tokens of a row.
        rows_per_batch (`int`), world_size (`int`), quadratic (`float`), rng (`np.random.Generator`):
            As [`PackedBatchSampler`] takes them.
    """
    per_round = rows_per_batch * world_size
    rows = best_fit_decreasing(lengths, capacity, rng)
    fill = np.array([lengths[row].sum() / capacity for row in rows])
    late = np.array([carried_before[row].max() >= PATIENCE for row in rows])
    # The last key is the first to sort by: rows with a document that waited long enough, then the fullest.
    order = np.lexsort((-fill, ~late))
    # At most a quarter waits: else the buffer would fill with rows that never get full, and new documents could not
    # come in.
    waiting = min(int(((fill < _FULL) & ~late).sum()), len(rows) // 4)
    # Whole rounds only, as every rank takes part in each; one at least, or the stream would stand still.
    out = max((len(rows) - waiting) // per_round, 1) * per_round
    sent, kept = order[:out], order[out:]
    rounds = levelled_rounds(
        [rows[i] for i in rng.permutation(sent)],
        document_cost(lengths, quadratic),
        rows_per_batch=rows_per_batch,
        world_size=world_size,
        rng=rng,
    )
    # In the order in which they came: a resumed run fills its buffer with them in that order.
    carried = np.concatenate([np.zeros(0, dtype=np.int64), *(rows[i] for i in kept)])
    return BufferedRows(rounds, np.sort(carried))
