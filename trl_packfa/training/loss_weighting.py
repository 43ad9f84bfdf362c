"""What an example counts in the loss: as many times as it has tokens, or once; and what each source's loss is.

TRL sums the log-probabilities of a step's trained tokens and divides by their number. With `loss_weighting="example"`
each token counts as one of its example's trained tokens and the sum is divided by the number of examples: the mean of
the examples' own losses, as unpacked training with one example a micro-batch computes it.

Shape letters: B rows, L row length, S documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..collator import SOURCES
from ..layout import PackedLayout


def documents_of_labels(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each next-token label `(B, L - 1)` the number of its document, and whether it is trained; rows that are not
    packed are a document each."""
    labels = inputs["labels"]
    layout: PackedLayout | None = inputs.get("packed_layout")
    if layout is None:
        documents = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    else:
        documents = layout.to(labels.device).document_ids().long()
    # Shifted as TRL shifts: place i is the label that token i predicts, and belongs to token i + 1's document.
    return documents[:, 1:], labels[:, 1:] != -100


def count_examples(inputs: Mapping[str, Any]) -> int:
    """How many documents of a batch train at least one token."""
    documents, trained = documents_of_labels(inputs)
    return int(documents[trained].unique().numel())


def as_example_labels(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A batch with one label for each example that trains, for the Trainer to count."""
    # Zeros, as the Trainer counts labels that are not -100. `shift_labels` it counts as they are, without shifting.
    labels = torch.zeros((1, count_examples(inputs)), dtype=torch.long, device=inputs["labels"].device)
    return {"labels": labels, "shift_labels": labels}


def example_weights(inputs: Mapping[str, Any]) -> torch.Tensor:
    """`(B, L - 1)`: one over the number of trained tokens of each label's document."""
    documents, trained = documents_of_labels(inputs)
    # 4 trained tokens weigh 1/4 each: the weights of an example add up to 1.
    counts = torch.zeros(int(documents.max()) + 1, device=documents.device)
    counts.index_add_(0, documents[trained], torch.ones_like(documents[trained], dtype=counts.dtype))
    return 1.0 / counts.clamp(min=1)[documents]


class WeightedModel:
    """A model whose log-probabilities are weighted for TRL to sum; keeps them as they were for metrics.

    Args:
        model (`torch.nn.Module`):
            A causal LM with TRL's fused LM head.
        weights (`torch.Tensor` or `None`):
            `(B, L - 1)`, or none for what TRL computes.
    """

    def __init__(self, model: torch.nn.Module, weights: torch.Tensor | None) -> None:
        self.model, self.weights = model, weights
        self.log_probs: torch.Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        """The model's forward."""
        outputs = self.model(**inputs)
        self.log_probs = outputs.log_probs.detach()
        if self.weights is not None:
            outputs.log_probs = outputs.log_probs * self.weights.to(outputs.log_probs)
        return outputs


def losses_by_source(inputs: Mapping[str, Any], log_probs: torch.Tensor) -> dict[str, tuple[float, int]]:
    """For each source of a batch, the summed loss of its trained tokens and their number."""
    documents, trained = documents_of_labels(inputs)
    size = len(inputs[SOURCES])
    sums = torch.zeros(size, device=log_probs.device, dtype=torch.float32)
    sums.index_add_(0, documents[trained], -log_probs[trained].float())
    counts = torch.bincount(documents[trained], minlength=size)
    totals: dict[str, tuple[float, int]] = {}
    for source, loss, count in zip(inputs[SOURCES], sums.tolist(), counts.tolist(), strict=False):
        _add_up(totals, {source: (loss, count)})
    return totals


class SourceLosses:
    """The mean loss of each source since the last log, of training and of evaluation.

    Args:
        accelerator (`Accelerator`): knows the other ranks, whose losses count as well.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # By mode and source: summed loss and trained tokens.
        self._sums: dict[str, dict[str, tuple[float, int]]] = {"train": {}, "eval": {}}

    def add(self, mode: str, inputs: Mapping[str, Any], log_probs: torch.Tensor) -> None:
        """Count a batch: `inputs` with its `sources`, `log_probs` `(B, L - 1)`."""
        _add_up(self._sums[mode], losses_by_source(inputs, log_probs))

    def read(self, mode: str) -> dict[str, float]:
        """By `loss/<source>`, `eval_loss/<source>` in evaluation; on every rank, and forgets what it has counted."""
        mine, totals = [self._sums[mode]], {}
        for losses in gather_object(mine) if self.accelerator.num_processes > 1 else mine:
            _add_up(totals, losses)
        self._sums[mode] = {}
        prefix = "" if mode == "train" else "eval_"
        return {f"{prefix}loss/{source}": loss / count for source, (loss, count) in sorted(totals.items()) if count}


def _add_up(totals: dict[str, tuple[float, int]], more: Mapping[str, tuple[float, int]]) -> None:
    for source, (loss, count) in more.items():
        before = totals.get(source, (0.0, 0))
        totals[source] = (before[0] + loss, before[1] + count)
