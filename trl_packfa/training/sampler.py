"""How packed batches reach the Trainer's data loader, and how the sampler learns its epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer_pt_utils

from ..packing import PackedBatchSampler

# By getattr: transformers 5.16 has none yet, and its Trainer takes no batches from a sampler.
_BatchRebalanceSampler: Any = getattr(trainer_pt_utils, "BatchRebalanceSampler", object)
TAKES_BATCHES = _BatchRebalanceSampler is not object


class RankAwareSampler(PackedBatchSampler, _BatchRebalanceSampler):
    """The Trainer hands a `BatchRebalanceSampler` to the DataLoader as a batch sampler that knows its rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not the other's, which would plan padded batches.
        PackedBatchSampler.__init__(self, *args, **kwargs)


class EpochCallback(TrainerCallback):
    """Tells the sampler its epoch: accelerate 1.15 does not forward `set_epoch` to a wrapped batch sampler."""

    def __init__(self, sampler: Callable[[], PackedBatchSampler | None]) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer's own count, which a resumed run restores."""
        sampler = self.sampler()
        if sampler is not None:
            sampler.set_epoch(int(state.epoch or 0))
