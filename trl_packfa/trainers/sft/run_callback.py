"""The callback of a packed SFT run: what happens before its first step, in each epoch, and after the last."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...terminal.telling import tell_data, tell_end


class RunCallback(TrainerCallback):
    """A callback that runs a packed trainer's own steps, and tells what the run does to the data and how fast it was.

    `trainer` is a [`PackedSFTTrainer`].
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # Time and trained tokens when training began.
        self._began = (0.0, 0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Require the check and set the noise. By now the Trainer has wrapped the model and loaded its checkpoint."""
        trainer = self.trainer
        trainer._require_check()
        trainer._add_noise()
        tell_data(trainer, trainer.packing_reports, trainer.packing_plan)
        self._began = (time.perf_counter(), trainer._total_train_tokens)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Set the sampler's epoch, which accelerate 1.15 does not do for a wrapped batch sampler."""
        if (sampler := self.trainer.packing_sampler) is not None:
            sampler.set_epoch(int(state.epoch or 0))  # a resumed run restores it

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the epoch after a step that has read the last document of a stream's pass."""
        if self.trainer._data.ends_epoch(self.trainer.accelerator):
            control.should_epoch_stop = True

    def on_train_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Tell the speed. Evaluations and checkpoints are part of the time."""
        self.trainer._settle_tokens()
        began, tokens = self._began
        padding = (self.trainer.packing_plan or {}).get("padding_without_packing")
        trained = self.trainer._total_train_tokens - tokens
        tell_end(args, tokens=trained, seconds=time.perf_counter() - began, padding=padding)
