"""Figures that one H100 or H200 should reach, with the measured ones: the table of `benchmarks/gpu/README.md`.

    python benchmarks/gpu/wanted.py [--results FOLDER]

The script reads the raw JSON that `run.py` writes to `benchmarks/gpu/results`. Missing files are not measured yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
NOT_YET = "not measured yet"
Report = dict[str, Any]


class Figure(NamedTuple):
    """One figure: its name, the wanted value, the step of `run.py` that measures it, and a reader of its report."""

    what: str
    wanted: str
    step: str
    read: Callable[[Report], str]

    @property
    def command(self) -> str:
        return f"python benchmarks/gpu/run.py {self.step}"


def side(report: Report, name: str) -> Report:
    """Return the figures of a side; empty if it failed or did not run."""
    found: Report = next((side for side in report["sides"] if side["side"] == name), {})
    return {} if "failed" in found else found


def ratio(name: str, base: str) -> Callable[[Report], str]:
    """Return a reader of the ratio of true tokens per second of two sides, with the attention of the base."""

    def read(report: Report) -> str:
        mine, theirs = side(report, name), side(report, base)
        if not mine or not theirs:
            return "a side failed"
        times = mine["tokens_per_second"] / theirs["tokens_per_second"]
        return f"{times:.2f} ({base} with {theirs['attention']})"

    return read


def rate(name: str) -> Callable[[Report], str]:
    return lambda report: f"{side(report, name).get('tokens_per_second', float('nan')):,.0f}"


def mfu(name: str) -> Callable[[Report], str]:
    """Return a reader of a side's share of the device's peak."""

    def read(report: Report) -> str:
        share = side(report, name).get("mfu")
        return "a side failed" if share is None else f"{share:.1%} of {report['peak_source']}"

    return read


def count(key: str, *names: str) -> Callable[[Report], str]:
    """Return a reader of one count of each side, in the order of `names`."""
    return lambda report: ", ".join(f"{name} {side(report, name).get(key, 'failed')}" for name in names)


FIGURES = (
    Figure("`step` over TRL padded, batch 4, accumulation 2, times", "1.9", "paper_x2", ratio("step", "padding")),
    Figure("the same, accumulation 16", "4.0", "paper_x16", ratio("step", "padding")),
    Figure("`step`, which takes padded training's steps, over TRL's `bfd` with FlashAttention, 8 B LoRA", "1.0",
           "llama3_8b", ratio("step", "trl-bfd@8192x1")),
    Figure("`bfd` over TRL's, with fused parts", "1.3", "llama3_8b", ratio("bfd@8192x1", "trl-bfd@8192x1")),
    Figure("MFU, 8 B LoRA in bfloat16", "50 %", "llama3_8b", mfu("bfd@8192x1")),
    Figure("true tokens a second on FLAN-like lengths, 8 B LoRA", "12,473", "llama3_8b", rate("bfd@8192x1")),
    Figure("tokens a second in NeMo Automodel's setting, where it has 12,473", "12,473", "automodel", rate("step")),
    Figure("QLoRA, `step` over TRL padded, times", "1.5", "qlora_8b", ratio("step", "padding")),
    Figure("graphs compiled in timed steps", "0", "compiled_1b",
           count("recompiles", "bfd-compiled@8192x1", "step-compiled")),
    Figure("times a step that the host waits (the Trainer's own are TRL's, too)", "TRL's or fewer", "llama3_8b",
           count("host_syncs_per_step", "trl-bfd@8192x1", "bfd@8192x1", "step")),
)  # fmt: skip


def measured(figure: Figure, results: Path = RESULTS) -> str:
    """Return the measured value of a figure with the name of the device."""
    path = results / f"{figure.step}.json"
    if not path.exists():
        return NOT_YET
    report = json.loads(path.read_text(encoding="utf-8"))
    gpus = report["environment"]["gpus"]
    # Ignore trials on a CPU or of a small model (`run.py --small`): they say nothing about a GPU.
    return f"{figure.read(report)}, {gpus[0]}" if gpus and "tiny" not in report["arguments"] else NOT_YET


def markdown(results: Path = RESULTS) -> str:
    lines = ["| what | wanted | measured | command |", "|---|---|---|---|"]
    lines += [f"| {f.what} | {f.wanted} | {measured(f, results)} | `{f.command}` |" for f in FIGURES]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    print(markdown(parser.parse_args().results))
