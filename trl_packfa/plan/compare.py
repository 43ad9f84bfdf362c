"""Comparison of every strategy with the padded run on the same documents: cuts, computed tokens and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.sft import PackedSFTConfig
from ..data.batching import FREE, Batching
from ..data.dataset import Tokens
from ..data.epoch_plan import EpochPlan, plan_epoch
from ..data.step_cutting import require_budget
from ..errors import InvalidConfig
from ..packing import PADDED, STRATEGIES, PackingReport, Strategy, plan_overflow


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
