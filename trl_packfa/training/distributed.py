"""What the processes of a run decide together: one that fails or differs must not leave the others waiting."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import InvalidDataset, PackingError

Result = TypeVar("Result")

# Failing ranks whose messages are shown; more say the same.
_SHOWN = 2


def agree(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """What `work` returns; if it fails on any rank, every rank raises the same error, which names the ranks.

    Raises:
        [`PackingError`]: of the type that the first failing rank raised.
        `RuntimeError`: for any other error of that rank.
    """
    if accelerator.num_processes == 1:
        return work()
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    # Types and texts, not exceptions: some cannot be pickled.
    mine = None if error is None else (_kind(error), _message(error))
    # Reached by every rank, whether its work failed or not: a rank that raised before would leave the others waiting.
    told: list[tuple[type[Exception], str] | None] = gather_object([mine])
    kinds = [one[0] for one in told if one is not None]
    if not kinds:
        return result
    ranks = f"of {accelerator.num_processes}"
    messages = [f"rank {rank} {ranks}: {one[1]}" for rank, one in enumerate(told) if one is not None]
    raise kinds[0]("\n".join(messages[:_SHOWN])) from error


def from_main_rank(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """What `work` returns on the main process, or the error that it raises there, on every rank."""
    found: list[Any] = [agree(accelerator, lambda: work() if accelerator.is_main_process else None)]
    return found[0] if accelerator.num_processes == 1 else broadcast_object_list(found)[0]


def require_same_documents(accelerator: Accelerator, lengths: np.ndarray) -> None:
    """Every rank plans the steps of all, so every rank needs the same training documents.

    Args:
        accelerator (`Accelerator`):
            Knows the other ranks.
        lengths (`np.ndarray`):
            Tokens of each document, in the dataset's order.

    Raises:
        [`InvalidDataset`]: on every rank, if they differ.
    """
    if accelerator.num_processes == 1:
        return
    # A checksum, as all lengths of a large dataset are megabytes to send.
    found = gather_object([(len(lengths), zlib.crc32(np.ascontiguousarray(lengths).tobytes()))])
    if len(set(found)) > 1:
        counts = ", ".join(f"rank {rank} {count} ({check:08x})" for rank, (count, check) in enumerate(found))
        raise InvalidDataset(
            f"the ranks do not have the same training documents; number, and checksum of their lengths: {counts}.",
            why=["every rank plans the steps of all of them"],
            do="Load and shuffle the dataset alike on every rank; the trainer deals it.",
        )


def _kind(error: Exception) -> type[Exception]:
    return type(error) if isinstance(error, PackingError) else RuntimeError


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, PackingError) else f"{type(error).__name__}: {error}"


class TrainBeginCallback(TrainerCallback):
    """Runs something once the model is wrapped, before the first step."""

    def __init__(self, *work: Callable[[], object]) -> None:
        self.work = work

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer has wrapped the model and loaded its checkpoint."""
        for work in self.work:
            work()
