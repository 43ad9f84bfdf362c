"""Deals rows to ranks, so that rows which run at the same time are of similar cost and no rank waits long."""

from __future__ import annotations

import numpy as np

# Rounds whose rows are sorted by cost together: enough to find rows alike, few enough to stay a shuffle.
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
    """The rows that all ranks run at the same time, round by round.

    On several ranks they are of similar cost among some hundred rounds' rows, and dealt so that no rank gets the
    costliest of every round; a round's rows come rank by rank. Only the last round may have too few.

    Args:
        rows (`list[np.ndarray]`):
            Indices of the documents of each row.
        cost (`np.ndarray`):
            Of each document, shape `(S,)`.
        rows_per_batch (`int`), world_size (`int`):
            Rows of one rank's micro-batch, number of ranks.
        rng (`np.random.Generator`), shuffle (`bool`):
            Order of the rounds.
    """
    per_round = rows_per_batch * world_size
    # One rank waits for nobody: rows stay in the order that was drawn.
    if world_size == 1:
        return [rows[start : start + per_round] for start in range(0, len(rows), per_round)]
    rounds: list[list[np.ndarray]] = []
    for start in range(0, len(rows), _LEVELLED_ROUNDS * per_round):
        stretch = rows[start : start + _LEVELLED_ROUNDS * per_round]
        # Taken off before sorting, so that a round that lacks rows is the last one and not the cheapest.
        tail = len(stretch) % per_round
        whole = sorted(stretch[: len(stretch) - tail], key=lambda row: -cost[row].sum())
        levelled = [whole[i : i + per_round] for i in range(0, len(whole), per_round)]
        order = rng.permutation(len(levelled)) if shuffle else range(len(levelled))
        rounds += [_dealt(levelled[i], cost, rows_per_batch, world_size) for i in order]
        rounds += [stretch[len(stretch) - tail :]] if tail else []
    return rounds


def _dealt(rows: list[np.ndarray], cost: np.ndarray, rows_per_batch: int, world_size: int) -> list[np.ndarray]:
    """The rows of a round, rank by rank: the costliest left goes to the rank with the least so far."""
    # Rows of cost 5, 4, 3, 2 for 2 ranks of 2 rows: 5 and 2 go to rank 0, 4 and 3 to rank 1.
    ranks: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    done = np.zeros(world_size)
    for row in sorted(rows, key=lambda row: -cost[row].sum()):
        open_ranks = [rank for rank in range(world_size) if len(ranks[rank]) < rows_per_batch]
        rank = min(open_ranks, key=lambda rank: done[rank])
        ranks[rank].append(row)
        done[rank] += cost[row].sum()
    return [row for rank in ranks for row in rank]
