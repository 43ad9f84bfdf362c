"""Measure the balance of ranks: cost of the busiest rank of a step over the mean, by method of distribution.

python benchmarks/rank_balance.py --mixes even uneven --ranks 8 512
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attention_speed import draw_lengths

from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.packing import best_fit_decreasing, document_cost, imbalance, recut_over_ranks

# Cost of attending to one token, in units of the cost of a token, for a model of 1 B parameters (`quadratic_weight`).
QUADRATIC = 1 / (6 * 2048)
_DOCUMENTS = 50_000
_DRAWS = 20


def bench_balance(
    *, mixes: Sequence[str], ranks: Sequence[int], per_rank: int, row: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Return maximum over mean of the ranks' cost in a step, averaged over 20 draws, for each method of distribution.

    A step has `per_rank` documents on each rank; documents are cut to the `row` tokens of a row.
    """
    rows = []
    for mix in mixes:
        lengths = np.minimum(draw_lengths(mix, _DOCUMENTS, seed=seed), row).astype(np.int64)
        rng = np.random.default_rng(seed)
        packed = best_fit_decreasing(lengths, row, rng)
        row_costs = np.array([document_cost(lengths[documents], QUADRATIC).sum() for documents in packed])
        rows += [{"lengths": mix, "ranks": n, **_ways(lengths, row_costs, n, per_rank, row, rng)} for n in ranks]
    return rows


def _ways(
    lengths: np.ndarray, row_costs: np.ndarray, ranks: int, per_rank: int, row: int, rng: np.random.Generator
) -> dict[str, float]:
    rows_per_rank = max(1, round(float(lengths.mean()) * per_rank / row))
    drawn = [rng.choice(lengths, ranks * per_rank) for _ in range(_DRAWS)]
    ways: dict[str, Callable[[np.ndarray], float]] = {
        "step": lambda step: _ours(step, ranks, per_rank * row),
        "longest document": lambda step: _bound(document_cost(step, QUADRATIC), ranks),
        "padded order": lambda step: _busiest(document_cost(step, QUADRATIC).reshape(ranks, -1).sum(1)),
        "by tokens": lambda step: _dealt(step, step.astype(float), ranks),
        "by squares": lambda step: _dealt(step, step.astype(float) ** 2, ranks),
        "rows of bfd": lambda step: _busiest(rng.choice(row_costs, (ranks, rows_per_rank)).sum(1)),
    }
    return {name: round(float(np.mean([way(step) for step in drawn])), 3) for name, way in ways.items()}


def _ours(step: np.ndarray, ranks: int, budget: int) -> float:
    return imbalance(recut_over_ranks(step, budget=budget, world_size=ranks, quadratic=QUADRATIC), step, QUADRATIC)


def _bound(cost: np.ndarray, ranks: int) -> float:
    """Return the lower bound: some rank must run the costliest document."""
    return max(1.0, float(cost.max() * ranks / cost.sum()))


def _dealt(step: np.ndarray, weight: np.ndarray, ranks: int) -> float:
    """Give the heaviest remaining document to the rank with the least weight, as multipack samplers do."""
    done, costs = np.zeros(ranks), np.zeros(ranks)
    cost = document_cost(step, QUADRATIC)
    for document in np.argsort(-weight, kind="stable"):
        rank = int(done.argmin())
        done[rank] += weight[document]
        costs[rank] += cost[document]
    return _busiest(costs)


def _busiest(costs: np.ndarray) -> float:
    return float(costs.max() / costs.mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--mixes", nargs="+", default=["even", "uneven"], help="lengths: mixes, or .json files")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--documents", type=int, default=8, help="documents of a step on each rank")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a row")
    args = parser.parse_args(argv)
    rows = bench_balance(mixes=args.mixes, ranks=args.ranks, per_rank=args.documents, row=args.row)
    return print_rows(rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
