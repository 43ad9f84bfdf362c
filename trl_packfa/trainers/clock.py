"""`TrainingClock`: what a run counts while it trains, without evaluations, checkpoints and checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import TrainerCallback


class TrainingClock(TrainerCallback):
    """A callback that adds up seconds, and other counts that only grow, while a run trains.

    `whole` is the sum over the run of what [`~TrainingClock.take`] has returned.
    """

    # Counts when the current part of training began; those of the parts before it that were not taken yet.
    _began: np.ndarray | None = None
    _parts: np.ndarray | float = 0.0
    whole: np.ndarray | float = 0.0

    def _counts(self) -> np.ndarray:
        """Read the seconds, and the other counts after them; float64."""
        return np.array([time.perf_counter()])

    def count(self) -> None:
        """Add the part of training that ends now, and begin another one."""
        now = self._counts()
        if self._began is not None:
            self._parts += now - self._began
        self._began = now

    def skip(self) -> None:
        """Begin a part of training. What came after the last one was no training."""
        self._began = self._counts()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside a `with` block."""
        self.count()
        yield
        self.skip()

    def take(self) -> np.ndarray:
        """Return the counts since the last call. A log calls it, for which the host has waited for the device."""
        self.count()
        taken, self._parts = self._parts + np.zeros_like(self._began), 0.0
        self.whole += taken
        return taken

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin to count."""
        self.skip()
        self._parts = self.whole = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Add what has trained. An evaluation or a checkpoint after it does not count."""
        self.count()

    def on_log(self, *_: Any, **__: Any) -> None:
        """Begin a part of training after a log, evaluation, prediction or checkpoint."""
        self.skip()

    on_evaluate = on_predict = on_save = on_log
