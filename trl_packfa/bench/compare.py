"""Measured figures of a side, and the comparison of two sides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidConfig
from .data import Facts
from .process import SideFailed
from .sides import Side

# With fewer timed steps, the variation between steps is unknown.
FEWEST_STEPS = 5
# A CPU side that gets less than this share of one core shares the machine with other work.
BUSY = 0.8
_DRAWS = 2000
_CONFIDENCE = 95


@dataclass
class Result:
    """Measured result of one side: facts, steps, and the reason if it failed."""

    side: Side
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    every_step: list[dict[str, Any]] = field(default_factory=list)
    untimed: int = 0  # of these steps, at the beginning
    end: dict[str, Any] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_running(self) -> bool:
        """`True` while the side has steps to run."""
        return not self.failure and not self.is_over

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The timed steps."""
        return self.every_step[self.untimed :]

    def built(self, facts: dict[str, Any]) -> None:
        """Record the facts of a built trainer; fail it if documents see each other, unless that is allowed."""
        self.facts = facts
        if facts["leaks"] and not self.side.kind.contaminated and not self.side.allowed:
            self.failure = (
                f"contaminated: documents see each other on this model and machine; "
                f"pass --contaminated {self.side.strategy} to measure it anyway"
            )

    def stepped(self, event: dict[str, Any] | None, *, max_steps: int) -> None:
        """Record a finished step; `None` means that no step is left. `max_steps` are timed, all if it is negative."""
        self.every_step += [event] if event is not None else []
        self.is_over = event is None or len(self.steps) == max_steps
        if self.is_over and not self.steps:
            self.failure = (
                f"the data lasts for {len(self.every_step)} steps, none of them timed; raise num_train_epochs"
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Record the reason if the side fails inside a `with` block, so that the other sides go on."""
        try:
            yield
        except SideFailed as error:
            self.failure = str(error)

    def total(self, name: str) -> float:
        """Return the sum of a figure over the timed steps."""
        return sum(step[name] for step in self.steps)

    @property
    def rate(self) -> float:
        """True tokens per second."""
        return self.total("tokens") / self.total("seconds")

    def to_dict(self, data: Facts, *, flops: float, peak: float, base: Result) -> dict[str, Any]:
        """Return all figures of a side, or only the reason if the side failed."""
        trainer = "none" if not self.side.kind.trains else "trl-packfa" if self.side.kind.ours else "TRL"
        row: dict[str, Any] = {"side": self.side.name, "trainer": trainer}
        if self.failure:
            return {**row, "failed": self.failure}
        trace, seconds = self.end["trace"], [step["seconds"] for step in self.steps]
        quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        # A side that cuts documents counts parts of them: take their mean length in the data.
        cut = self.side.kind.strategy.wraps or not self.total("documents")
        tokens_per_example = data.mean_length if cut else self.total("tokens") / self.total("documents")
        return {
            **row,
            "tokens_per_second": self.rate,
            "examples_per_second": self.rate / tokens_per_example,
            "seconds_per_step": statistics.median(seconds),
            "seconds_per_step_quartiles": [quarters[0], quarters[2]],
            "cpu_seconds_per_step": statistics.median(step["cpu_seconds"] for step in self.steps),
            "ratio": asdict(compare(self, base)),
            "peak_bytes": self.end["peak_bytes"],
            "steps_per_epoch": self.facts["steps_per_epoch"],
            "tokens_per_step": self.total("tokens") / len(self.steps),
            "micro_batches_per_step": self.total("micro_batches") / len(self.steps),
            "fill": self.total("tokens") / self.total("computed"),
            "largest_micro_batch": max(step["largest"] for step in self.steps),
            "first_loss": self.every_step[0]["loss"],
            "final_loss": self.steps[-1]["loss"],
            "validation_loss": self.end["eval_loss"],
            "mfu": flops * self.rate / peak if flops else None,
            "recompiles": int(self.total("compiled")),
            "host_syncs_per_micro_batch": trace.get("host_syncs"),
            "aten_calls_per_step": trace.get("aten_calls"),
            "attention": self.end["attention"],
            "remark": self.facts["remark"],
            "leaks": self.facts["leaks"],
            "equal": self.facts["equal"],
            "operations": trace.get("operations", []),
            "steps": self.steps,
        }


@dataclass(frozen=True)
class Ratio:
    """True tokens per second of a side divided by those of the base, with a confidence interval.

    `low` and `high` are the 95 % interval over redrawn steps. All are `None` if a side failed.
    """

    value: float | None
    low: float | None
    high: float | None
    verdict: str = ""  # empty if the ratio allows a conclusion, else the reason and what to do


def compare(side: Result, base: Result) -> Ratio:
    """Return the ratio of two sides: no value if one failed, 1 if both are the same side."""
    if side.failure or base.failure:
        who = base if base.failure else side
        return Ratio(None, None, None, f"no ratio: {who.side.name} failed")
    if side is base:
        return Ratio(1.0, 1.0, 1.0)
    if not base.steps:  # sides run one after the other, and the base comes later
        return Ratio(None, None, None, f"no ratio yet: {base.side.name} has not run")
    low, high = _interval(side.steps, base.steps)
    steps = min(len(side.steps), len(base.steps))
    verdict = ""
    if _had_no_core(side) or _had_no_core(base):
        verdict = "the machine was busy with other work: a side had less than one core; free it and measure again"
    elif steps < FEWEST_STEPS:
        verdict = f"too short to conclude: {steps} timed steps; raise --max_steps to {FEWEST_STEPS} or more"
    elif low <= 1.0 <= high:
        verdict = f"no difference shown: {low:.2f} to {high:.2f} holds 1; raise --max_steps, or free the machine"
    return Ratio(side.rate / base.rate, low, high, verdict)


def _had_no_core(side: Result) -> bool:
    """Tell whether a side shared the machine; never for a GPU side, whose host may wait even on a free machine."""
    return "cuda" not in side.facts["equal"]["device"] and side.total("cpu_seconds") < BUSY * side.total("seconds")


def _interval(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the bootstrap interval of the ratio.

    Steps of the same round are drawn together, because they ran under the same load of the machine.
    """
    rng, common = np.random.default_rng(0), min(len(mine), len(theirs))
    drawn = rng.integers(common, size=(_DRAWS, common))
    tokens, seconds = (
        [np.array([step[name] for step in steps[:common]])[drawn].sum(axis=1) for steps in (mine, theirs)]
        for name in ("tokens", "seconds")
    )
    ratios = (tokens[0] / seconds[0]) / (tokens[1] / seconds[1])
    tail = (100 - _CONFIDENCE) / 2
    return float(np.percentile(ratios, tail)), float(np.percentile(ratios, 100 - tail))


def require_equal_work(results: list[Result]) -> None:
    """Raise [`InvalidConfig`] with two sides that did different work, and their differences."""
    whole = [result for result in results if not result.failure]
    for result in whole[1:]:
        first = whole[0]
        mine, theirs = result.facts["equal"], first.facts["equal"]
        why = [f"{name}: {theirs[name]} and {mine[name]}" for name in theirs if theirs[name] != mine[name]]
        if why := [*why, *_other_examples(first, result)]:
            raise InvalidConfig(
                f"{first.side.name} and {result.side.name} did not do the same work.",
                why=why,
                do="Only equal work can be compared; give both sides the same arguments and environment.",
            )


def _other_examples(first: Result, second: Result) -> list[str]:
    """Return a message if two sides keep the padded run's order but a step holds different tokens."""
    if not (first.side.kind.in_order and second.side.kind.in_order):
        return []
    for number, (mine, theirs) in enumerate(zip(first.every_step, second.every_step, strict=False), 1):
        if (mine["tokens"], mine["fingerprint"]) != (theirs["tokens"], theirs["fingerprint"]):
            return [f"step {number} holds other examples: {mine['tokens']} and {theirs['tokens']} tokens"]
    return []
