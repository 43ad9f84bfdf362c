"""Collation that counts rows and compares their beginnings on the host.

Otherwise each forward would have to wait for the device to learn what its attention mask holds, or which of its rows
share a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from ..errors import InvalidLayout
from ..layout.padded_rows import PaddedRows, rows_of, tell_rows
from ..layout.shared_rows import share, tell_shared

_MASK, _IDS = "attention_mask", "input_ids"


class CountedBatch(dict):
    """A batch that knows the rows of its attention masks, and attaches them to the mask tensors; also its step.

    As a dict it holds the batch's own values only. It keeps the rows through loader workers, pinned memory and `to` a
    device. Batches that others make from its values (accelerate's `dispatch_batches`, a user's own dict) lose them;
    then the masks are read again. `rows` are named like their mask, `compared` like the token ids that were compared:
    they are [`SharedRows`] where some rows share a prefix. `step` is the batch's [`StepPart`] and `origins` says which
    padded micro-batches its rows are from, if steps are cut anew.
    """

    def __init__(
        self,
        values: Any = (),
        rows: dict[str, PaddedRows] | None = None,
        compared: dict[str, PaddedRows] | None = None,
        *,
        step: Any = None,
        origins: Any = None,
    ) -> None:
        super().__init__(values)
        self.rows, self.compared, self.step, self.origins = rows or {}, compared or {}, step, origins
        for by_name, tell in ((self.rows, tell_rows), (self.compared, tell_shared)):
            for name, known in by_name.items():
                if isinstance(self.get(name), torch.Tensor) and tuple(self[name].shape) == known.shape:
                    tell(self[name], known)

    def to(self, device: Any, **options: Any) -> CountedBatch:
        """Copy the batch to a device, with the micro-batches that run before it. Accelerate calls this."""
        step = self.step
        if step is not None and step.before:
            step = replace(step, before=tuple(batch.to(device, **options) for batch in step.before))
        moved = send_to_device(dict(self), device, **options)
        return CountedBatch(moved, self.rows, self.compared, step=step, origins=self.origins)


def counted(batch: dict[str, Any], **facts: Any) -> CountedBatch:
    """Copy a batch as a [`CountedBatch`]; `facts` are its `step` and `origins`."""
    known = (batch.rows, batch.compared) if isinstance(batch, CountedBatch) else ()
    return CountedBatch(batch, *known, **facts)


class CountingCollator:
    """A wrapper of a collator that makes each batch a [`CountedBatch`]. Batches without a mask stay as they are.

    It looks like the wrapped collator: `isinstance`, reading attributes and setting them work as there. With
    `share_prefixes` it finds rows that begin with the same tokens too.
    """

    collator: Callable[..., Any]
    share_prefixes: bool

    def __init__(self, collator: Callable[..., Any], share_prefixes: bool = False) -> None:
        vars(self).update(collator=collator, share_prefixes=share_prefixes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Collate with the wrapped collator, and count the rows of each mask."""
        batch = self.collator(*args, **kwargs)
        if not isinstance(batch, dict):
            return batch
        rows: dict[str, PaddedRows] = {}
        for name, value in batch.items():
            if name.endswith(_MASK) and isinstance(value, torch.Tensor) and value.dim() == 2:
                try:
                    rows[name] = rows_of(value)
                except InvalidLayout:  # the model's call will refuse this mask
                    continue
        compared = {}
        if self.share_prefixes:
            named = {name.removesuffix(_MASK) + _IDS: found for name, found in rows.items()}
            compared = {name: share(found, batch[name]) or found for name, found in named.items() if name in batch}
        return CountedBatch(batch, rows, compared) if rows else batch

    @property
    def __class__(self) -> Any:
        return type(self.collator)

    def __reduce__(self) -> Any:
        return CountingCollator, (self.collator, self.share_prefixes)

    def __getattr__(self, name: str) -> Any:
        if name == "collator":  # not set yet, for example while it is unpickled
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.collator, name, value)
