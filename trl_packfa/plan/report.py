"""A plan with all its figures: every strategy and the padded run on the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..config.sft import PackedSFTConfig
from ..data.batching import FREE, Batching
from ..data.dataset import Tokens
from ..data.epoch_plan import EpochPlan, plan_epoch
from ..data.step_cutting import require_budget
from ..errors import InvalidConfig
from ..packing import PADDED, STRATEGIES, PackingReport, Strategy, plan_overflow
from .gather import Source
from .memory import FORMULA, Memory, ModelShape

_PERCENTILES = (50, 90, 99)
BASIS = (
    "work per true token, pads included, compared with the padded run: a token costs 1, each token that it attends to "
    "costs q; ranks wait for the slowest. It is an arithmetic ratio, not a timing: it assumes that small "
    "micro-batches use the GPU as well as large ones"
)


@dataclass(frozen=True)
class Outcome:
    """Result of one strategy: the report of cut documents, their lengths, and the epoch by number of ranks.

    Ranks that share rows count as one in an epoch's `world_size`.
    """

    strategy: Strategy
    report: PackingReport
    lengths: np.ndarray
    epochs: dict[int, EpochPlan]

    def epoch(self) -> EpochPlan:
        """Return the epoch on the first number of ranks."""
        return next(iter(self.epochs.values()))


@dataclass(frozen=True)
class Plan:
    """A plan: documents, outcomes of the strategies, and advice.

    `shape` and `memory` (by strategy) exist only if a model is given. `without_checkpointing` is the memory of the
    chosen strategy without gradient checkpointing; it exists only if the arguments use checkpointing.
    """

    source: Source
    args: PackedSFTConfig
    outcomes: dict[str, Outcome]
    shape: ModelShape | None
    memory: dict[str, Memory] = field(default_factory=dict)
    without_checkpointing: Memory | None = None
    advice: tuple[str, ...] = ()

    @property
    def chosen(self) -> Outcome:
        """Outcome of the strategy that the arguments name."""
        return self.outcomes[self.args.strategy.name]

    @property
    def padded(self) -> Outcome:
        """Outcome of TRL's padded run, without packing."""
        return self.outcomes[PADDED.name]

    @property
    def world_size(self) -> int:
        """Number of ranks for the main tables: the first requested number."""
        return next(iter(self.chosen.epochs))

    @property
    def basis(self) -> str:
        """Explanation of the predicted speed-up, as text."""
        q = f"q = {self.shape.quadratic:.2e}" if self.shape else "q = 0 without a model: attention costs nothing"
        return f"{BASIS} ({q})."

    def speed_up(self, outcome: Outcome, world_size: int | None = None) -> float:
        """Return the true tokens per unit of cost, divided by the padded run's; ranks wait for the slowest in both."""
        world_size = world_size or self.world_size
        ours, theirs = outcome.epochs[world_size], self.padded.epochs[world_size]
        return (ours.tokens / ours.cost) / (theirs.tokens / theirs.cost) if ours.cost and theirs.cost else 1.0

    def lengths(self) -> dict[str, float]:
        """Return mean, percentiles and maximum of the document lengths in tokens, before anything is cut."""
        lengths = self.source.tokens.lengths
        marks = {f"p{p}": float(np.percentile(lengths, p)) for p in _PERCENTILES}
        return {"mean": float(lengths.mean()), **marks, "longest": float(lengths.max())}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON."""
        q = self.shape.quadratic if self.shape else 0.0
        return {
            "source": self.source.name,
            "documents": len(self.source.tokens.lengths),
            "lengths": self.lengths(),
            "arguments": {
                "per_device_train_batch_size": self.args.per_device_train_batch_size,
                "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
                "max_length": self.args.max_length,
                "overflow": self.args.overflow,
                "packing_strategy": self.chosen.strategy.name,
            },
            "strategies": {name: self._strategy(outcome) for name, outcome in self.outcomes.items()},
            "speed_up_basis": {"quadratic": q, "text": self.basis},
            "model": asdict(self.shape) if self.shape else None,
            "memory_formula": FORMULA if self.shape else None,
            "memory_without_checkpointing": _bytes(self.without_checkpointing),
            "advice": list(self.advice),
        }

    def _strategy(self, outcome: Outcome) -> dict[str, Any]:
        epochs = {}
        for ranks, epoch in outcome.epochs.items():
            derived = {
                "examples_per_step": epoch.examples_per_step,
                "tokens_per_micro_batch": epoch.tokens_per_micro_batch,
                "total_steps": total_steps(epoch, self.args),
                "speed_up": self.speed_up(outcome, ranks),
            }
            epochs[str(ranks)] = {**asdict(epoch), **derived}
        memory = self.memory.get(outcome.strategy.name)
        return {"cut": outcome.report.to_dict(), "ranks": epochs, "memory_bytes": _bytes(memory)}


def _bytes(memory: Memory | None) -> dict[str, float] | None:
    return None if memory is None else {**asdict(memory), "total": memory.total}


def compare(
    tokens: Tokens,
    args: PackedSFTConfig,
    ranks: Sequence[int],
    quadratic: float,
    cut: str = FREE,
    *,
    on_images: bool = False,
) -> dict[str, Outcome]:
    """Return the outcome of every strategy by name, the padded run first.

    Strategies that images rule out, or a document longer than `max_tokens_per_microbatch`, are left out. If the
    arguments chose one of them, raise [`InvalidConfig`]. Raise [`InvalidDataset`] if documents are too long under
    `overflow="error"`, or nothing can be trained.
    """
    outcomes: dict[str, Outcome] = {}
    for strategy in (PADDED, *STRATEGIES.values()):
        if strategy.fills_rows and (args.max_length is None or on_images):
            continue
        options = {"quadratic": quadratic, "cut": cut, "keeps_ranks": on_images}
        try:
            outcomes[strategy.name] = _outcome(tokens, args, ranks, strategy, options)
        except InvalidConfig:
            if strategy == args.strategy:
                raise
    return outcomes


def _outcome(
    tokens: Tokens, args: PackedSFTConfig, ranks: Sequence[int], strategy: Strategy, options: dict[str, Any]
) -> Outcome:
    # If the chosen strategy has its own policy, the user did not choose `overflow`: compare with TRL's truncation.
    policy = strategy.overflow or (args.overflow if args.strategy.overflow is None else "truncate")
    spans, report = plan_overflow(
        *tokens, max_length=args.max_length, policy=policy, as_padded=not strategy.fills_rows
    )
    lengths = spans.stop - spans.start
    if strategy.recuts_steps:
        longest = int(lengths.argmax())
        which = f"document {int(spans.document[longest])}"
        require_budget(args, lengths, int(lengths[longest]), which, cut=options["cut"])
    batchings = {
        n: Batching.of(args, strategy=strategy, world_size=n // args.sequence_parallel, **options) for n in ranks
    }
    return Outcome(strategy, report, lengths, {n: plan_epoch(lengths, b) for n, b in batchings.items()})


def total_steps(epoch: EpochPlan, args: PackedSFTConfig) -> int:
    """Return the optimizer steps of the whole run, counted as in the Trainer."""
    return args.max_steps if args.max_steps > 0 else int(np.ceil(args.num_train_epochs * epoch.steps))
