"""Long run of a tiny model: memory, file descriptors, threads and log lines must not grow, steps must not slow down.
`python tests/shared/soak.py --steps 20000 --data map` prints one JSON line; `test_soak.py` runs a short one and, with
`SOAK_STEPS=20000`, the long ones. Linux only: figures come from /proc."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time

import tiny
import torch
from datasets import Dataset, IterableDataset
from training import arguments, packed_trainer
from transformers import TrainerCallback

DOCUMENTS = 512


def documents(count=DOCUMENTS):
    """Return short tokenized documents of uneven lengths."""
    for i in range(count):
        yield {"input_ids": [3 + (i * 7 + j * j) % 90 for j in range(2 + i * 13 % 29)]}


def data(kind):
    if kind == "stream":
        return IterableDataset.from_generator(documents)
    return Dataset.from_generator(documents) if kind == "map" else Dataset.from_list(list(documents()))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Counter(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = 0

    def emit(self, record):
        self.lines += 1


class Watch(TrainerCallback):
    """Callback that samples the process a hundred times and times every step."""

    def __init__(self, steps):
        self.every, self.counter, self.samples, self.seconds = max(steps // 100, 1), Counter(), [], []
        logging.getLogger().addHandler(self.counter)

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.thread_time()  # of this thread: another process's load is not ours

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.thread_time() - self.started)
        if state.global_step % self.every == 0:
            files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            self.samples.append((resident(), files, threads, self.counter.lines))


def soak(steps, kind, strategy, out):
    """Train `steps` steps and return what grew after the first tenth."""
    model = tiny.model(layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    packing = {"packing": False} if strategy == "padded" else {"packing_strategy": strategy}
    args = arguments(
        out=out, **packing, max_length=64, max_steps=steps, logging_steps=max(steps // 20, 1),
        learning_rate=1e-3, use_peft=False,
    )  # fmt: skip
    started = time.perf_counter()
    trainer = packed_trainer(args, model=model, train_dataset=data(kind), peft_config=None)
    watch = Watch(steps)
    trainer.add_callback(watch)
    built = time.perf_counter()
    trainer.train()
    warm = len(watch.samples) // 10
    first, last, some = watch.samples[warm], watch.samples[-1], watch.samples[warm :: max(len(watch.samples) // 10, 1)]
    tenth = max(steps // 10, 1)
    early, late = watch.seconds[tenth : 2 * tenth], watch.seconds[-tenth:]
    return {
        "data": kind, "strategy": strategy, "steps": steps, "seconds": round(time.perf_counter() - started, 1),
        "built_s": round(built - started, 2), "memory_mb": [round(sample[0] / 2**20, 1) for sample in some],
        "memory_growth": round(last[0] / first[0] - 1, 4), "files": [first[1], last[1]],
        "threads": [first[2], last[2]], "log_lines": [first[3], last[3]],
        "first_step_ms": round(watch.seconds[0] * 1e3, 1),
        "median_step_ms": [round(statistics.median(part) * 1e3, 2) for part in (early, late)],
        "slowest_step_ms": round(max(watch.seconds[tenth:]) * 1e3, 1),
    }  # fmt: skip


def main():
    torch.set_num_threads(1)  # what a step computes is then in its own thread's time
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--data", choices=("map", "stream"), default="map")
    parser.add_argument("--strategy", default="step", help="a packing strategy, or 'padded' for TRL's own training")
    options = parser.parse_args()
    logging.getLogger("trl_packfa").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as out:
        print(json.dumps(soak(options.steps, options.data, options.strategy, out)), file=sys.__stdout__)


if __name__ == "__main__":
    main()
