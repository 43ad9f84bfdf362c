"""The callback of an SFT run: what happens before its first step, in each epoch, and after the last."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...patching.state import unpadding_of
from ...terminal.telling import tell_data, tell_end
from ..clock import TrainingClock


class RunCallback(TrainingClock):
    """A callback that runs a trainer's own steps, and tells what the run does to the data and how fast it was.

    `trainer` is a [`PackedSFTTrainer`]. After the seconds it counts the tokens of shared prefixes that were not
    computed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._tokens = 0  # that were trained when training began

    def _counts(self) -> np.ndarray:
        sharing = unpadding_of(self.trainer.model) if self.trainer.args.share_prefixes else None
        return np.array([time.perf_counter(), 0 if sharing is None else sharing.shared])

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Require the check and set the noise. By now the Trainer has wrapped the model and loaded its checkpoint."""
        trainer = self.trainer
        trainer._require_check()
        trainer._add_noise()
        tell_data(trainer, trainer.packing_reports, trainer.packing_plan)
        self._tokens = trainer._total_train_tokens
        super().on_train_begin()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Set the sampler's epoch, which accelerate 1.15 does not do for a wrapped batch sampler."""
        if (sampler := self.trainer.packing_sampler) is not None:
            sampler.set_epoch(int(state.epoch or 0))  # a resumed run restores it

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step. End the epoch after one that has read the last document of a stream's pass."""
        super().on_step_end()
        if self.trainer._data.ends_epoch(self.trainer.accelerator):
            control.should_epoch_stop = True

    def on_train_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Tell the speed of a packed run, without evaluations and checkpoints."""
        self.take()
        if not self.trainer.args.packing:
            return
        self.trainer._settle_tokens()
        padding = (self.trainer.packing_plan or {}).get("padding_without_packing")
        trained = self.trainer._total_train_tokens - self._tokens
        tell_end(args, tokens=trained, seconds=np.asarray(self.whole)[0], padding=padding)
