"""The benchmark: one process per side, stepped in turn, so that changes of the machine's load hit all sides."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from transformers import AutoConfig, PreTrainedConfig

from ..config.sft import PackedSFTConfig
from ..data.flops import ModelFlops
from ..terminal import print_table
from ..terminal.progress import errors_only
from ..trainers.sft.throughput import known_peak, peak_flops
from .arguments import Setup, read_arguments
from .compare import Result, require_equal_work
from .data import Facts, facts, read_documents, save_documents
from .environment import environment
from .presets import PRESETS, save_preset_apart
from .process import FINISH, STEP, SideProcess
from .table import heading, remarks, speed_rows, training_rows

_PEAK_SECONDS = 0.1


def bench(argv: list[str]) -> int:
    """Run the benchmark with these flags and print its tables. Return the exit code: 0 done, 1 if a side failed."""
    setup = read_arguments(argv)
    wanted = setup.bench
    with errors_only():
        report = run_bench(setup)
    print(heading(report))
    print_table(speed_rows(report))
    print_table(training_rows(report))
    for line in remarks(report):
        print(f"! {line}")
    for side in report["sides"] if wanted.profile else []:
        print(f"{side['side']}, one step:")
        operations = side.get("operations", [])
        print_table([{"operation": name, "calls": calls, "own ms": ms} for name, calls, ms in operations])
    return int(any("failed" in side for side in report["sides"]))


def run_bench(setup: Setup) -> dict[str, Any]:
    """Run the benchmark of the arguments, and return all figures, ready for JSON, as `--output` gets them.

    That file is also written whenever sides have ended, because the next ones may run out of time; [`Journal`] has
    each step at once. Raise [`PackingError`] for arguments and data that cannot be compared. A failed side is only a
    row of the result.
    """
    documents = read_documents(setup)
    with tempfile.TemporaryDirectory(prefix="trl-packfa-bench-") as name:
        folder = Path(name)
        model = model_path(setup, folder)
        lost = save_documents(setup, documents, model, folder)
        dataset: Any = load_from_disk(str(folder / "train"))
        data = facts(dataset, setup.bench.trainer)
        _tell(f"{data.documents:,} documents, {data.tokens:,} tokens, longest {data.longest:,}")
        results = [Result(side, untimed=setup.bench.untimed_steps) for side in setup.sides]
        config = AutoConfig.from_pretrained(model)
        peak = Peak(config, setup.args)
        head = {"environment": environment(), "arguments": setup.argv, "data": {**data._asdict(), "report": lost}}
        ended: list[Result] = []
        base = next((result for result in results if result.side.name == setup.bench.base), results[0])
        journal = Journal(setup.bench.output)
        journal.write(**head, peak_flops=peak.best, peak_source=peak.source)
        report: dict[str, Any] = {}
        for group in [results] if setup.bench.interleave else [[result] for result in results]:
            _measure(group, setup, model, folder, peak, journal)
            ended += group
            # If every side failed, the adapter may be the reason; then the plan of its operations would fail too.
            counted = setup.bench.trainer == "sft" and not all(result.failure for result in ended)
            figures = {
                "model_flops_per_token": _flops(setup, config, data) if counted and peak.best else 0.0,
                "peak_flops": peak.best,
                "peak_source": peak.source,
            }
            rates = {"flops": figures["model_flops_per_token"], "peak": peak.best}
            report = {**head, **figures, "sides": [result.to_dict(data, **rates, base=base) for result in ended]}
            if setup.bench.output:
                Path(setup.bench.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        require_equal_work(results)
        return report


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Journal:
    """File `.jsonl` beside the report with every step and its tokens, at once: a run that is cut off leaves it."""

    def __init__(self, output: str | None) -> None:
        self._path = None if output is None else Path(output).with_suffix(".jsonl")
        if self._path is not None:
            self._path.write_text("", encoding="utf-8")

    def write(self, **figures: Any) -> None:
        """Append a line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")


def _flops(setup: Setup, config: PreTrainedConfig, data: Facts) -> float:
    """Return the operations that a true token takes; 0 if they cannot be counted."""
    needed = ModelFlops.planned(config, setup.args)
    return 0.0 if needed is None else needed.per_token(seen=data.tokens_seen_by_token, trained=data.trained_share)


class Peak:
    """Peak rate that MFU is a share of.

    It is `peak_tflops`, the device's data sheet, or the best measured rate of the model's own matrix product. The
    measurement is repeated during the run, because the speed of a shared machine varies. It is 0 if it fails.
    """

    def __init__(self, config: PreTrainedConfig, args: PackedSFTConfig) -> None:
        self._config, self._args = config, args
        if args.peak_tflops is not None:
            self.source = "peak_tflops"
        elif known_peak(args) is not None:
            self.source = f"data sheet of {torch.cuda.get_device_name(args.device)}"
        else:
            self.source = "measured here"
        self.best = self._rate()

    def measure(self) -> None:
        """Measure the peak once more, in a fraction of a step; do nothing if the peak is known."""
        if known_peak(self._args) is None:
            self.best = max(self.best, self._rate(seconds=_PEAK_SECONDS))

    def _rate(self, **options: Any) -> float:
        rate = peak_flops(self._config, self._args, **options)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # give the memory of the product back to the sides
        return rate or 0.0


def model_path(setup: Setup, folder: Path) -> str:
    """Return the name or path of the model; save a preset with random weights first. A folder of that name wins."""
    name = setup.bench.model or setup.args.model_name_or_path or ""
    if name not in PRESETS or Path(name).is_dir():
        return name
    kept = setup.bench.presets
    options = {
        "dtype": setup.args.dtype or "float32", "tokenizer": setup.bench.tokenizer, "seed": setup.args.seed
    }  # fmt: skip
    described = "-".join(map(str, (name, *options.values())))
    path = folder / "model" if kept is None else Path(kept) / re.sub(r"[^\w-]+", "_", described)
    if kept is None or not path.exists():
        _tell(f"making {name} with random weights ...")
        made = path.with_name(path.name + ".part")  # what is cut off is made again
        shutil.rmtree(made, ignore_errors=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        # A separate process, so that its GPU memory, with the CUDA context, is free again for the sides.
        save_preset_apart(name, made, **options)
        made.rename(path)
    return str(path)


def _measure(results: list[Result], setup: Setup, model: str, folder: Path, peak: Peak, journal: Journal) -> None:
    """Build all sides one after the other, then step them in turn until each has finished its steps."""
    with ExitStack() as stack:
        sides: list[tuple[Result, SideProcess]] = []
        for result in results:
            _tell(f"{result.side.name}: building")
            began = time.perf_counter()
            process = SideProcess(setup.argv, result.side, model, folder, log=folder / f"side{len(sides)}.log")
            sides.append((result, stack.enter_context(closing(process))))
            with result.failing():
                result.built(process.answer())
            _tell(f"{result.side.name}: {result.failure or f'built in {time.perf_counter() - began:.0f} s'}")
            if result.failure:
                process.close()
        rounds = 0
        while any(result.is_running for result in results):
            for result, process in sides:
                with result.failing():
                    if result.is_running:
                        event = process.ask(STEP)
                        result.stepped(event, max_steps=setup.args.max_steps)
                        if event is not None:
                            journal.write(side=result.side.name, timed=bool(result.steps), **event)
            rounds += 1
            peak.measure()
            seconds = [f"{r.side.name} {r.every_step[-1]['seconds']:.2f} s" for r in results if not r.failure]
            _tell(f"step {rounds}: {', '.join(seconds)}")
        for result, process in sides:
            with result.failing():
                if not result.failure:
                    result.end = process.ask(FINISH) or {}
