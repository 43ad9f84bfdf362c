"""Count the true tokens and documents of an optimizer step, and a fingerprint of its tokens, outside the trainer."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch

from ..trainers.common.collating import CountedBatch

# Token ids are mixed before they are added up, so that different sets of tokens have different sums.
_MIX = 2_654_435_761
_MODULUS = 2**31


class Work(NamedTuple):
    """Counts of one optimizer step."""

    tokens: int  # true tokens
    computed: int  # tokens that went through the model, pads included
    documents: int  # parts of documents if rows cut them; rows if the batch has no boundaries
    micro_batches: int  # each one forward
    largest: int  # tokens of the largest micro-batch, pads included
    fingerprint: int  # equal for equal tokens in any order
    loss: float = 0.0  # sum of the micro-batches' losses


class StepCounter:
    """Counter of the batches and losses of a trainer's steps; it counts outside the timed part.

    Losses are those that `training_step` returns. To log each step would be unfair: some trainers compute entropy and
    accuracy only in the steps that they log.
    """

    def __init__(self, trainer: Any) -> None:
        self._batches: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        get_batch_samples, training_step = trainer.get_batch_samples, trainer.training_step

        def samples(*args: Any, **kwargs: Any) -> Any:
            batches, number = get_batch_samples(*args, **kwargs)
            # A re-cut step holds its micro-batches. Copies, because the trainer removes entries from its batches.
            self._batches = [copy(part) for batch in batches for part in getattr(batch, "micro_batches", [batch])]
            self._losses = []
            return batches, number

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._losses.append(training_step(*args, **kwargs))
            return self._losses[-1]

        trainer.get_batch_samples, trainer.training_step = samples, step

    def take(self) -> Work:
        """Return the counts of the last step."""
        counted = [_count(batch) for batch in self._batches]
        return Work(
            tokens=sum(part.tokens for part in counted),
            computed=sum(part.computed for part in counted),
            documents=sum(part.documents for part in counted),
            micro_batches=len(counted),
            largest=max((part.computed for part in counted), default=0),
            fingerprint=sum(part.fingerprint for part in counted) % _MODULUS,
            loss=sum(float(loss) for loss in self._losses),
        )


def _count(batch: dict[str, Any]) -> Work:
    ids = batch["input_ids"].cpu()
    true, documents = _true_tokens(batch, ids)
    mixed = (ids[true].long() * _MIX + 1) % _MODULUS
    computed = int(true.sum()) if isinstance(batch, CountedBatch) else ids.numel()
    return Work(int(true.sum()), computed, documents, 1, computed, int((mixed * mixed % _MODULUS).sum()))


def _true_tokens(batch: dict[str, Any], ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a mask `(B, L)` of the true tokens, and the number of documents."""
    layout = batch.get("packed_layout")
    if layout is not None:
        true = (torch.arange(ids.numel()) < ids.numel() - layout.padding).view_as(ids)
        return true, len(layout.lengths) - bool(layout.padding)
    if "attention_mask" in batch:
        return batch["attention_mask"].cpu().bool(), ids.shape[0]
    return torch.ones_like(ids, dtype=torch.bool), int((batch["position_ids"] == 0).sum())
