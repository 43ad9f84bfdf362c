"""A sampler of packed batches that the Trainer's data loader accepts, and a callback that sets its epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer_pt_utils

from ...packing import PackedBatchSampler

# With getattr, because transformers 5.16 does not have it; its Trainer takes no batches from a sampler.
_BatchRebalanceSampler: Any = getattr(trainer_pt_utils, "BatchRebalanceSampler", object)
TAKES_BATCHES = _BatchRebalanceSampler is not object


class RankAwareSampler(PackedBatchSampler, _BatchRebalanceSampler):
    """A packed sampler that the Trainer passes to the DataLoader as a batch sampler with a rank.

    The Trainer does so for a `BatchRebalanceSampler`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `BatchRebalanceSampler`'s own `__init__` would plan padded batches.
        PackedBatchSampler.__init__(self, *args, **kwargs)


class EpochCallback(TrainerCallback):
    """A callback that sets the sampler's epoch, because accelerate 1.15 does not do so for a wrapped batch sampler."""

    def __init__(self, sampler: Callable[[], PackedBatchSampler | None]) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the sampler's epoch to the Trainer's count, which a resumed run restores."""
        sampler = self.sampler()
        if sampler is not None:
            sampler.set_epoch(int(state.epoch or 0))
