"""What a trainer's optimizer steps hold, counted from outside: true tokens, documents, which tokens; pads never."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch

from ..trainers.collating import CountedBatch

# Mixes token ids, so that the sum of the mixed ones tells different sets of tokens apart.
_MIX = 2_654_435_761
_MODULUS = 2**31


class Work(NamedTuple):
    """One optimizer step.

    Attributes:
        tokens (`int`): true tokens.
        computed (`int`): tokens that went through the model, pads included.
        documents (`int`): documents; parts of documents where rows cut them; rows where nobody knows boundaries.
        micro_batches (`int`): forwards.
        largest (`int`): tokens of the largest micro-batch, pads included.
        fingerprint (`int`): the same for the same tokens in any order.
    """

    tokens: int
    computed: int
    documents: int
    micro_batches: int
    largest: int
    fingerprint: int


class StepCounter:
    """Listens at a trainer's `get_batch_samples`; what it heard is counted when asked, outside of the clock."""

    def __init__(self, trainer: Any) -> None:
        self._inner = trainer.get_batch_samples
        self._heard: list[dict[str, Any]] = []
        trainer.get_batch_samples = self._listen

    def _listen(self, *args: Any, **kwargs: Any) -> Any:
        batches, number = self._inner(*args, **kwargs)
        # A step that is cut anew holds its micro-batches; the trainer takes entries out of its batches.
        self._heard = [copy(part) for batch in batches for part in getattr(batch, "micro_batches", [batch])]
        return batches, number

    def take(self) -> Work:
        """What the step that was heard last holds."""
        counted = [_count(batch) for batch in self._heard]
        self._heard = []
        return Work(
            tokens=sum(part.tokens for part in counted),
            computed=sum(part.computed for part in counted),
            documents=sum(part.documents for part in counted),
            micro_batches=len(counted),
            largest=max((part.computed for part in counted), default=0),
            fingerprint=sum(part.fingerprint for part in counted) % _MODULUS,
        )


def _count(batch: dict[str, Any]) -> Work:
    ids = batch["input_ids"].cpu()
    true, documents = _true_tokens(batch, ids)
    mixed = (ids[true].long() * _MIX + 1) % _MODULUS
    computed = int(true.sum()) if isinstance(batch, CountedBatch) else ids.numel()
    return Work(int(true.sum()), computed, documents, 1, computed, int((mixed * mixed % _MODULUS).sum()))


def _true_tokens(batch: dict[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Which tokens `(B, L)` are no padding, and how many documents there are."""
    layout = batch.get("packed_layout")
    if layout is not None:
        true = (torch.arange(ids.numel()) < ids.numel() - layout.padding).view_as(ids)
        return true, len(layout.lengths) - bool(layout.padding)
    if "attention_mask" in batch:
        return batch["attention_mask"].cpu().bool(), ids.shape[0]
    return torch.ones_like(ids, dtype=torch.bool), int((batch["position_ids"] == 0).sum())
