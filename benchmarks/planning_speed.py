"""Measure the time of planning, which assigns documents to rows and steps by index.

python benchmarks/planning_speed.py --documents 1000000
python benchmarks/planning_speed.py --steps-of 1 64 1024 4096 --row 2048
python benchmarks/planning_speed.py --start-of 10000000 100000000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from attention_speed import draw_lengths
from datasets import Dataset
from rank_balance import QUADRATIC

from trl_packfa.bench.measuring import peak_bytes, reset_peak
from trl_packfa.cli.output import add_json, print_rows
from trl_packfa.data.batching import Batching
from trl_packfa.data.dataset import read_lengths
from trl_packfa.data.epoch_plan import plan_epoch
from trl_packfa.packing import STEP, PackedBatchSampler, imbalance, recut_over_ranks

# Batch size, accumulation and ranks of the paper's setting.
_PER_DEVICE, _ACCUMULATION, _RANKS = 4, 2, 8
_TIMED_STEPS = 200
# Number of documents that are written at a time.
_PART = 1_000_000


def bench_pack(*, documents: int, row: int, mix: str, seed: int = 0) -> list[dict[str, Any]]:
    """Measure seconds, documents per second and added peak memory of each part; documents are cut to `row` tokens."""
    lengths = np.minimum(draw_lengths(mix, documents, seed=seed), row).astype(np.int64)
    size = _PER_DEVICE * _ACCUMULATION * _RANKS
    steps = [lengths[i : i + size] for i in range(0, documents - size + 1, size)][:_TIMED_STEPS]

    def plan() -> PackedBatchSampler:
        return PackedBatchSampler(lengths, capacity=row, rows_per_batch=_PER_DEVICE, seed=seed, world_size=_RANKS)

    def cut() -> None:
        for step in steps:
            recut_over_ranks(step, budget=_PER_DEVICE * row, world_size=_RANKS, quadratic=0.0)

    sampler = plan()
    parts: dict[str, tuple[Callable[[], object], int]] = {
        f"bfd: plan, {_RANKS} ranks (fill {sampler.fill:.2%})": (plan, documents),
        "bfd: an epoch of batches, one rank": (lambda: sum(1 for _ in sampler), documents),
        f"step: re-cut {len(steps)} steps of {size} documents": (cut, len(steps) * size),
    }
    return [_timed(name, act, count) for name, (act, count) in parts.items() if count]


def bench_steps(*, ranks: Sequence[int], row: int, mix: str, seed: int = 0) -> list[dict[str, Any]]:
    """Measure the CPU time with which a rank plans a step of `ranks` processes, and the balance of the step.

    A padded micro-batch has 4 documents, accumulation is 1 or 16; the best of three steps.
    """
    rng, found = np.random.default_rng(seed), []
    for count, accumulation in product(ranks, (1, 16)):
        size = count * accumulation * _PER_DEVICE
        steps = [
            np.minimum(draw_lengths(mix, size, seed=int(rng.integers(2**31))), row).astype(np.int64) for _ in range(3)
        ]
        options = {"budget": _PER_DEVICE * row, "world_size": count, "quadratic": QUADRATIC}
        seconds, balances = [], []
        for step in steps:
            start = time.process_time()
            dealt = recut_over_ranks(step, **options)
            balances.append(imbalance(dealt, step, QUADRATIC))
            seconds.append(time.process_time() - start)
        found.append({"ranks": count, "accumulation": accumulation, "documents": size,
                      "micro-batches": len(dealt[0]), "imbalance": round(float(np.mean(balances)), 4),
                      "CPU ms": round(min(seconds) * 1e3, 1)})  # fmt: skip
    return found


def bench_start(*, documents: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """Measure how ranks begin on a saved dataset: the first one counts its tokens, others map the counts."""
    found = []
    for count in documents:
        with tempfile.TemporaryDirectory() as folder:
            dataset = _saved(Path(folder) / "data.arrow", count, np.random.default_rng(seed))
            read = partial(read_lengths, dataset)
            found += [_timed(f"lengths, {which} rank", read, count) for which in ("first", "another")]
            plan = partial(plan_epoch, read(), Batching(STEP, _PER_DEVICE, _ACCUMULATION, _RANKS))
            found.append(_timed(f"plan of an epoch, {_RANKS} ranks", plan, count))
    return found


def _saved(path: Path, documents: int, rng: np.random.Generator) -> Dataset:
    """Write documents of one to seven tokens, and open the file."""
    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, documents, _PART):
            stops = np.cumsum(rng.integers(1, 8, min(_PART, documents - start)))
            ids = pa.array(rng.integers(0, 99, stops[-1], dtype=np.int32))
            column = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], stops]), type=pa.int32()), ids)
            writer.write_batch(pa.record_batch([column], schema=schema))
    return Dataset.from_file(str(path))


def _timed(name: str, act: Callable[[], object], documents: int) -> dict[str, Any]:
    reset_peak()
    before = peak_bytes()
    start = time.perf_counter()
    act()
    seconds = time.perf_counter() - start
    return {
        "part": name,
        "documents": documents,
        "seconds": round(seconds, 3),
        "documents/s": round(documents / seconds),
        "peak MB added": round((peak_bytes() - before) / 1e6, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--row", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--mix", default="uneven", help="lengths: a mix, or a .json file")
    parser.add_argument("--steps-of", type=int, nargs="+", help="plan steps of so many ranks instead")
    parser.add_argument("--start-of", type=int, nargs="+", help="begin on saved datasets of so many documents instead")
    options = vars(parser.parse_args(argv))
    as_json, ranks, sizes = options.pop("json"), options.pop("steps_of"), options.pop("start_of")
    if sizes:
        return print_rows(bench_start(documents=sizes), as_json=as_json)
    if ranks:
        found = bench_steps(ranks=ranks, row=options["row"], mix=options["mix"])
        return print_rows(found, as_json=as_json)
    return print_rows(bench_pack(**options), as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
