"""Rows counted and compared where they lie on the host, so that no forward waits for the device to say what its mask
holds, or which of its rows begin alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device

from ..errors import InvalidLayout
from ..runtime.padded_rows import PaddedRows, rows_of, tell_rows
from ..runtime.shared_rows import share, tell_shared

_MASK, _IDS = "attention_mask", "input_ids"


class CountedBatch(dict):
    """A batch that knows what rows its masks hold, and tells the masks wherever it goes: nothing but the batch's own
    values are in it.

    It comes through loader workers and pinned memory as it is, and `to` a device. Of what else is made of its values
    (accelerate's `dispatch_batches`, a dict of a user's own) the masks are read again.

    Attributes:
        rows (`dict[str, PaddedRows]`): by the name of a mask.
        compared (`dict[str, PaddedRows]`): by the name of the ids that were compared, [`SharedRows`] where some begin
            alike.
    """

    def __init__(
        self,
        values: Any = (),
        rows: dict[str, PaddedRows] | None = None,
        compared: dict[str, PaddedRows] | None = None,
    ) -> None:
        super().__init__(values)
        self.rows, self.compared = rows or {}, compared or {}
        self.tell()

    def tell(self) -> None:
        """Let the masks and ids carry what is known of them."""
        for told, tell in ((self.rows, tell_rows), (self.compared, tell_shared)):
            for name, known in told.items():
                if isinstance(self.get(name), torch.Tensor) and tuple(self[name].shape) == known.shape:
                    tell(self[name], known)

    def to(self, device: Any, **options: Any) -> CountedBatch:
        """The batch on a device, as accelerate asks for it."""
        return CountedBatch(send_to_device(dict(self), device, **options), self.rows, self.compared)


class CountingCollator:
    """A collator whose batches also know what rows their masks hold; whatever is no batch with a mask passes.

    It passes for the collator that it wraps: `isinstance`, its attributes, and what is set on it.

    Args:
        collator (`Callable`):
            The trainer's own.
        share_prefixes (`bool`, *optional*, defaults to `False`):
            Whether its batches know which rows begin with the same tokens, too.
    """

    collator: Callable[..., Any]
    share_prefixes: bool

    def __init__(self, collator: Callable[..., Any], *, share_prefixes: bool = False) -> None:
        vars(self).update(collator=collator, share_prefixes=share_prefixes)

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
        return CountedBatch(batch, rows, self._compared(batch, rows) if self.share_prefixes else {}) if rows else batch

    def _compared(self, batch: dict[str, Any], rows: dict[str, PaddedRows]) -> dict[str, PaddedRows]:
        """By the name of the ids their rows, [`SharedRows`] where some begin alike."""
        named = {name.removesuffix(_MASK) + _IDS: found for name, found in rows.items()}
        return {name: share(found, batch[name]) or found for name, found in named.items() if name in batch}

    @property
    def __class__(self) -> Any:
        return type(self.collator)

    def __reduce__(self) -> Any:
        return _counting, (self.collator, self.share_prefixes)

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # while it is being made
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.collator, name, value)


def _counting(collator: Callable[..., Any], share_prefixes: bool) -> CountingCollator:
    return CountingCollator(collator, share_prefixes=share_prefixes)
