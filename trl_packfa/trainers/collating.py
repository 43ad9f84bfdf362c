"""Rows counted where they lie on the host, so that no forward waits for the device to say what its mask holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidLayout
from ..runtime.padded_rows import PaddedRows, rows_of, tell_rows

# The key under which rows travel from the collator to the step, where they are taken out again.
ROWS = "trl_packfa_rows"
_MASK = "attention_mask"


class CountingCollator:
    """A collator whose batches also say what rows their masks hold; whatever is no batch with a mask passes.

    Args:
        collator (`Callable`):
            The trainer's own, whose attributes are found here too.
    """

    def __init__(self, collator: Callable[..., Any]) -> None:
        self.collator = collator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The own collator's batch."""
        batch = self.collator(*args, **kwargs)
        if not isinstance(batch, dict):
            return batch
        rows: dict[str, PaddedRows] = {}
        for name, value in batch.items():
            if name.endswith(_MASK) and isinstance(value, torch.Tensor) and value.dim() == 2:
                try:
                    rows[name] = rows_of(value)
                except InvalidLayout:  # whoever calls a model with it is told
                    continue
        return {**batch, ROWS: rows} if rows else batch

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)


def told_rows(batch: Any) -> Any:
    """A batch on its device whose masks carry the rows that came with it, which leave the batch."""
    if isinstance(batch, dict) and ROWS in batch:
        rows = batch.pop(ROWS)
        for name, known in rows.items():
            if tuple(batch[name].shape) == known.shape:
                tell_rows(batch[name], known)
    return batch
