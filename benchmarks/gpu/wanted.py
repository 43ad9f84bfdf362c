"""Figures that one H100 or H200 should reach, with the measured ones: the table of `benchmarks/gpu/README.md`.

    python benchmarks/gpu/wanted.py [--results FOLDER]

The script reads the raw JSON that `run.py` writes to `benchmarks/gpu/results`, and the steps of sides that were cut
off. Missing files are not measured yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
NOT_YET = "not measured yet"
# Before the table, on the page.
BEGIN = "<!-- generated: benchmarks/gpu/wanted.py -->"
# A side that was cut off counts from so many timed steps on.
_FEWEST = 3
Report = dict[str, Any]


class Figure(NamedTuple):
    """One figure: its name, the wanted value, the step of `run.py` that measures it, and a reader of its report."""

    what: str
    wanted: str
    step: str
    read: Callable[[Report], str]
    options: str = ""

    @property
    def command(self) -> str:
        return f"python benchmarks/gpu/run.py {self.step}{self.options}"


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
        cut = [f"{x['side']} cut off after {x['cut_off']} steps" for x in (mine, theirs) if "cut_off" in x]
        remarks = [f"{base} with {theirs['attention']}", *cut]
        return f"{times:.2f} ({', '.join(remarks)})"

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


_TRL, _LIGER = "trl-bfd@8192x1", "trl-bfd-liger@8192x1"
# Wanted is what `model.py` predicts for one H100, where it does: to be passed.
FIGURES = (
    Figure("`step` over TRL padded, batch 4, accumulation 2, times", "2.5 to 3.3, predicted", "paper_x2",
           ratio("step", "padding")),
    Figure("the same, accumulation 16", "2.8 to 3.7, predicted", "paper_x16", ratio("step", "padding")),
    Figure("`step`, which takes padded training's steps, over TRL's `bfd` with FlashAttention, 8 B LoRA",
           "1.5, predicted", "llama3_8b", ratio("step", _TRL)),
    Figure("`bfd` over TRL's `bfd` with FlashAttention", "1.6, predicted", "llama3_8b", ratio("bfd@8192x1", _TRL)),
    Figure("`bfd` over TRL's with FlashAttention and Liger's layers", "1.37, predicted", "llama3_8b",
           ratio("bfd@8192x1", _LIGER)),
    Figure("MFU, 8 B LoRA in bfloat16", "45 %, predicted", "llama3_8b", mfu("bfd@8192x1")),
    Figure("true tokens a second on FLAN-like lengths, 8 B LoRA", "14,000, predicted", "llama3_8b",
           rate("bfd@8192x1")),
    Figure("tokens a second in NeMo Automodel's setting, where it has 12,473 (without its dropout)",
           "12,473 (12,100 to 13,200 predicted)", "automodel", rate("step")),
    Figure("QLoRA, `step` over TRL padded, times", "1.5", "qlora_8b", ratio("step", "padding")),
    Figure("graphs compiled in timed steps", "0", "compiled_1b", count("recompiles", "bfd-compiled@8192x1")),
    Figure("times a micro-batch that the host waits (the Trainer's own are TRL's, too)", "TRL's or fewer",
           "llama3_8b", count("host_syncs_per_micro_batch", _TRL, "bfd@8192x1", "step"), " --trace"),
)  # fmt: skip


def read_report(step: str, results: Path = RESULTS) -> Report | None:
    """Return the report of a step of `run.py`, with the sides that were cut off; `None` if it has not run."""
    whole, journal = results / f"{step}.json", results / f"{step}.jsonl"
    report = json.loads(whole.read_text(encoding="utf-8")) if whole.exists() else None
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    head, *steps = [json.loads(line) for line in lines if line.endswith("}")] or [None]  # the last may be cut off, too
    report = report or (head and {**head, "sides": []})
    if report is None:
        return None
    ended = {side["side"] for side in report["sides"]}
    for name in dict.fromkeys(step["side"] for step in steps if step["timed"] and step["side"] not in ended):
        timed = [step for step in steps if step["side"] == name and step["timed"]]
        if len(timed) >= _FEWEST:
            report["sides"].append(_cut_off(name, timed, report))
    return report


def _cut_off(name: str, steps: list[Report], report: Report) -> Report:
    """Return the figures of a side that was cut off, from its timed steps."""
    tokens, seconds = (sum(step[key] for step in steps) for key in ("tokens", "seconds"))
    flops = report.get("model_flops_per_token")  # known as soon as one side has ended
    found = {"side": name, "tokens_per_second": tokens / seconds, "attention": "?", "cut_off": len(steps)}
    found["recompiles"] = sum(step["compiled"] for step in steps)
    return found | {"mfu": flops * tokens / seconds / report["peak_flops"] if flops else None}


def measured(figure: Figure, results: Path = RESULTS) -> str:
    """Return the measured value of a figure with the name of the device."""
    report = read_report(figure.step, results)
    if report is None or not report["environment"]["gpus"]:
        return NOT_YET
    # Ignore trials on a CPU or of a small model (`run.py --small`): they say nothing about a GPU.
    return NOT_YET if "tiny" in report["arguments"] else f"{figure.read(report)}, {report['environment']['gpus'][0]}"


def markdown(results: Path = RESULTS) -> str:
    lines = ["| what | wanted | measured | command |", "|---|---|---|---|"]
    lines += [f"| {f.what} | {f.wanted} | {measured(f, results)} | `{f.command}` |" for f in FIGURES]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    print(markdown(parser.parse_args().results))
