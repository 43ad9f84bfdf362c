"""Decisions of all processes together. A process that fails or differs must not leave the others waiting."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ...errors import InvalidDataset, PackingError

Result = TypeVar("Result")

# Number of failing ranks whose messages are shown. More would repeat them.
_SHOWN = 2


def agree(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` and return its result; if it fails on any rank, raise the same error on every rank.

    Raises:
        [`PackingError`]: of the type that the first failing rank raised, with the failing ranks.
        `RuntimeError`: for any other error of that rank.
    """
    if accelerator.num_processes == 1:
        return work()
    result: Any = None
    error: Exception | None = None
    # Send types and texts, because some exceptions cannot be pickled.
    mine: tuple[type[Exception], str] | None = None
    try:
        result = work()
    except PackingError as caught:
        error, mine = caught, (type(caught), str(caught))
    except Exception as caught:
        error, mine = caught, (RuntimeError, f"{type(caught).__name__}: {caught}")
    # Every rank reaches this line, even if its work failed. A rank that raised earlier would leave the others waiting.
    told: list[tuple[type[Exception], str] | None] = gather_object([mine])
    kinds = [one[0] for one in told if one is not None]
    if not kinds:
        return result
    ranks = f"of {accelerator.num_processes}"
    messages = [f"rank {rank} {ranks}: {one[1]}" for rank, one in enumerate(told) if one is not None]
    raise kinds[0]("\n".join(messages[:_SHOWN])) from error


def from_main_rank(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, and return its result, or raise its error, on every rank."""
    found: list[Any] = [agree(accelerator, lambda: work() if accelerator.is_main_process else None)]
    return found[0] if accelerator.num_processes == 1 else broadcast_object_list(found)[0]


def require_same_documents(accelerator: Accelerator, lengths: np.ndarray) -> None:
    """Require the same training documents on every rank, because every rank plans the steps of all ranks."""
    if accelerator.num_processes == 1:
        return
    # Send a checksum, because the lengths of a large dataset would be megabytes.
    found = gather_object([(len(lengths), zlib.crc32(np.ascontiguousarray(lengths).tobytes()))])
    if len(set(found)) > 1:
        counts = ", ".join(f"rank {rank} {count} ({check:08x})" for rank, (count, check) in enumerate(found))
        raise InvalidDataset(
            f"the ranks do not have the same training documents; their number and checksum of lengths: {counts}.",
            why=["every rank plans the steps of all ranks"],
            do="Load and shuffle the same dataset on every rank. The trainer deals it to the ranks.",
        )
