"""Rows counted and compared where they lie on the host, so that no forward waits for the device to say what its mask
holds, or which of its rows begin alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidLayout
from ..runtime.padded_rows import PaddedRows, rows_of, tell_rows
from ..runtime.shared_rows import share, tell_shared

# The keys under which rows travel from the collator to the step, where they are taken out again: those of masks, and
# those of input ids that were compared.
ROWS, COMPARED = "trl_packfa_rows", "trl_packfa_compared"
_MASK, _IDS = "attention_mask", "input_ids"


class CountingCollator:
    """A collator whose batches also say what rows their masks hold; whatever is no batch with a mask passes.

    Args:
        collator (`Callable`):
            The trainer's own, whose attributes are found here too.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            Whether its batches say which rows begin with the same tokens, too.
    """

    def __init__(self, collator: Callable[..., Any], *, share_prefixes: bool = False) -> None:
        self.collator, self.share_prefixes = collator, share_prefixes

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
        if not rows:
            return batch
        return {**batch, ROWS: rows, **({COMPARED: self._compared(batch, rows)} if self.share_prefixes else {})}

    def _compared(self, batch: dict[str, Any], rows: dict[str, PaddedRows]) -> dict[str, PaddedRows]:
        """By the name of the ids their rows, [`SharedRows`] where some begin alike."""
        named = {name.removesuffix(_MASK) + _IDS: found for name, found in rows.items()}
        return {name: share(found, batch[name]) or found for name, found in named.items() if name in batch}

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)


def told_rows(batch: Any) -> Any:
    """A batch on its device whose masks and ids carry the rows that came with it, which leave the batch."""
    if isinstance(batch, dict) and ROWS in batch:
        rows = batch.pop(ROWS)
        for name, known in rows.items():
            if tuple(batch[name].shape) == known.shape:
                tell_rows(batch[name], known)
        for name, known in batch.pop(COMPARED, {}).items():
            if tuple(batch[name].shape) == known.shape:
                tell_shared(batch[name], known)
    return batch
