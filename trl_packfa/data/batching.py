"""`Batching`: the settings that decide how documents become micro-batches and steps; `deal` cuts one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..config.common import CommonConfig
from ..packing import PackedBatchSampler, Strategy, fewest_micro_batches, recut, recut_over_ranks

# How `step` may cut: freely; freely, but a padded micro-batch's examples run at the same time; as the padded run cuts.
FREE, TOGETHER, KEPT = "free", "together", "kept"


@dataclass(frozen=True)
class Batching:
    """Strategy, sizes and number of processes of a run; processes that share rows count once.

    `cut` is how `step` may cut (`FREE`, `TOGETHER`, `KEPT`). `budget` is the token budget of its micro-batches; the
    default is the size of the padded run's largest one. `quadratic` is the cost of attention between two tokens,
    relative to the other cost of one token. `pad_to` is TRL's `pad_to_multiple_of`. `keeps_ranks` is true for images:
    `step` cuts each rank's own examples, and its default budget is the largest padded micro-batch of the step.
    """

    strategy: Strategy
    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    max_length: int | None = None
    budget: int | None = None
    quadratic: float = 0.0
    sampling: str = "random"
    drop_last: bool = False
    pad_to: int = 1
    seed: int = 0
    cut: str = FREE
    keeps_ranks: bool = False

    @classmethod
    def of(cls, args: CommonConfig, **changes: Any) -> Batching:
        """Read the settings from a config; `changes` win over it."""
        read = {
            "strategy": args.strategy,
            "batch_size": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "world_size": args.data_parallel_size,
            "max_length": args.max_length,
            "budget": args.max_tokens_per_microbatch,
            "sampling": str(args.train_sampling_strategy),
            "drop_last": args.dataloader_drop_last,
            "pad_to": args.pad_to_multiple_of or 1,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }
        return cls(**{**read, **changes})

    def micro_batch_tokens(self, lengths: np.ndarray) -> int:
        """Return an upper bound for the tokens of a micro-batch, padding included."""
        longest = int(lengths.max(initial=0))
        if self.strategy.recuts_steps:
            # A document is never cut. One that is longer than the budget is a micro-batch of its own.
            return max(self.budget or self.batch_size * longest, longest)
        if self.strategy.fills_rows:
            return self.batch_size * (self.max_length or longest)
        if not self.strategy.packs:
            return self.batch_size * int(self.padded(np.array(longest)))
        # `minibatch`: in the worst case the longest documents are in one micro-batch. `partition` finds them without
        # sorting all.
        largest = np.partition(lengths, -min(self.batch_size, len(lengths)))[-self.batch_size :]
        return int(self.padded(largest.sum()))

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """Round row lengths, in tokens, up to a multiple of `pad_to`."""
        # For example 5 becomes 8 if `pad_to` is 4.
        return -(-tokens // self.pad_to) * self.pad_to

    def draw(self, lengths: np.ndarray) -> np.ndarray:
        """Draw an epoch's micro-batches as accelerate deals them to ranks, and return their documents' lengths.

        The result is int64, shape (micro-batch of a rank, rank, example), with 0 where there is no example. With
        several ranks the last round is filled up with the first documents.
        """
        drawn = lengths[self._order(lengths)]
        per_round = self.world_size * self.batch_size
        if self.drop_last:
            drawn = drawn[: len(drawn) // per_round * per_round]
        missing = -len(drawn) % per_round
        # `resize` repeats from the start, like accelerate's `even_batches`, which acts with several ranks only.
        more = np.resize(drawn, missing) if self.world_size > 1 else np.zeros(missing, dtype=np.int64)
        return np.concatenate([drawn, more]).reshape(-1, self.world_size, self.batch_size)

    def _order(self, lengths: np.ndarray) -> np.ndarray:
        """Return document indices in an order like that of the Trainer's sampler, from another random draw."""
        if self.sampling == "sequential":
            return np.arange(len(lengths))
        if self.sampling == "group_by_length":
            generator = torch.Generator().manual_seed(self.seed)
            return np.array(get_length_grouped_indices(lengths.tolist(), self.batch_size, generator=generator))
        return np.random.default_rng(self.seed).permutation(len(lengths))

    def recut(self, step: np.ndarray, *, budget: int) -> list[list[np.ndarray]]:
        """Re-cut one step of [`~Batching.draw`]; return, per rank, the document lengths of each micro-batch."""
        if self.keeps_ranks:
            return self._recut_by_rank(step)
        # For example 2 micro-batches of 3 examples on 1 rank: [0, 0, 0, 1, 1, 1].
        groups = np.arange(step.shape[0] * step.shape[1]).repeat(step.shape[2])
        documents, groups = step[step > 0], groups[step.ravel() > 0]
        options = {"cut": self.cut, "budget": budget, "world_size": self.world_size, "quadratic": self.quadratic}
        dealt = deal(documents, groups, **options)
        return [[documents[part] for part in rank] for rank in dealt]

    def _recut_by_rank(self, step: np.ndarray) -> list[list[np.ndarray]]:
        largest = int((self.padded(step.max(axis=2)) * (step > 0).sum(axis=2)).max())
        budget = self.budget or largest
        ranks = [own[own > 0] for own in step.swapaxes(0, 1).reshape(step.shape[1], -1)]
        count = max(fewest_micro_batches(own, budget) for own in ranks)
        found = []
        for own in ranks:  # one with fewer than the others makes more of them, as the trainer does
            parts = recut(own, budget=budget, num_micro_batches=min(count, len(own)), quadratic=self.quadratic)
            found.append([own[part] for part in parts] + [own[:0]] * (count - len(parts)))
        return found

    def row_sampler(self, lengths: np.ndarray, *, rank: int = 0) -> PackedBatchSampler:
        """Build a rank's sampler of rows, for a strategy that fills rows."""
        assert self.max_length is not None, "the config requires max_length for rows"
        return PackedBatchSampler(
            lengths,
            rank=rank,
            capacity=self.max_length,
            rows_per_batch=self.batch_size,
            seed=self.seed,
            world_size=self.world_size,
            shuffle=self.sampling != "sequential",
            wrapped=self.strategy.wraps,
            quadratic=self.quadratic,
        )


def deal(
    lengths: np.ndarray, groups: np.ndarray, *, cut: str, budget: int, world_size: int, quadratic: float
) -> list[list[list[int]]]:
    """Deal the examples of a step to ranks and micro-batches; return, per rank, the indices of each micro-batch.

    `lengths` are the tokens of each example, `groups` the numbers of their padded micro-batches. `cut` is `FREE`,
    `TOGETHER` or `KEPT`; `KEPT` keeps the padded micro-batches and deals them to the ranks in turn. `budget` is the
    tokens of a micro-batch, `quadratic` the relative cost of attention between two tokens.
    """
    if cut == KEPT:
        parts = [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]
        parts += [[]] * (-len(parts) % world_size)  # without `even_batches` the last round may not be whole
        # Example: padded micro-batches 0 to 5 on 2 ranks. Rank 0 gets 0, 2, 4, the same ones as in the padded run.
        return [parts[rank::world_size] for rank in range(world_size)]
    together = groups if cut == TOGETHER else None
    return recut_over_ranks(lengths, budget=budget, world_size=world_size, quadratic=quadratic, groups=together)
