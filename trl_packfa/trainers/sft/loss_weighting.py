"""Weighting of the loss by token or by example, and the mean loss of each source.

TRL sums the log-probabilities of a step's trained tokens and divides by their number. With `loss_weighting="example"`
each token is weighted by one over the number of its example's trained tokens, and the sum is divided by the number of
examples. The result is the mean of the examples' own losses, like padded training with one example per micro-batch.

Shape letters: B rows, L row length, S documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ...collator import SOURCES
from ...layout import PackedLayout


def documents_of_labels(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each label `(B, L - 1)`, its document (a row, if not packed), and whether it is trained."""
    labels = inputs["labels"]
    layout: PackedLayout | None = inputs.get("packed_layout")
    if layout is None:
        documents = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    else:
        documents = layout.to(labels.device).document_ids().long()
    # Shift as TRL does: position i is the label that token i predicts. It belongs to the document of token i + 1.
    return documents[:, 1:], labels[:, 1:] != -100


def count_examples(inputs: Mapping[str, Any]) -> int:
    """Count the documents of a batch that train at least one token."""
    documents, trained = documents_of_labels(inputs)
    return int(documents[trained].unique().numel())


def as_example_labels(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Make a batch with one label for each trained example, so that the Trainer counts examples."""
    # The Trainer counts labels that are not -100, so the labels are zeros. It counts `shift_labels` without shifting.
    labels = torch.zeros((1, count_examples(inputs)), dtype=torch.long, device=inputs["labels"].device)
    return {"labels": labels, "shift_labels": labels}


def example_weights(inputs: Mapping[str, Any], *, divided_by_tokens: bool = False) -> torch.Tensor:
    """Return, for each label `(B, L - 1)`, one over the number of trained tokens of its document.

    With `divided_by_tokens`, TRL divides the sum by the batch's trained tokens, not by the step's examples. Then the
    weights make the result the mean of the batch's examples.
    """
    documents, trained = documents_of_labels(inputs)
    # For example 4 trained tokens weigh 1/4 each. The weights of an example add up to 1.
    counts = torch.zeros(int(documents.max()) + 1, device=documents.device)
    counts.index_add_(0, documents[trained], torch.ones_like(documents[trained], dtype=counts.dtype))
    share = counts.sum() / (counts > 0).sum().clamp(min=1) if divided_by_tokens else 1.0
    return share / counts.clamp(min=1)[documents]


class WeightedModel:
    """A wrapper of a model that weights the log-probabilities for TRL's sum. It keeps the unweighted ones for metrics.

    `model` is a causal LM with TRL's fused LM head, `weights` `(B, L - 1)`, or `None` for TRL's own loss.
    """

    def __init__(self, model: torch.nn.Module, weights: torch.Tensor | None) -> None:
        self.model, self.weights = model, weights
        self.log_probs: torch.Tensor | None = None

    def __call__(self, **inputs: Any) -> Any:
        """Run the model's forward, keep the log-probabilities, and weight them."""
        outputs = self.model(**inputs)
        self.log_probs = outputs.log_probs.detach()
        if self.weights is not None:
            outputs.log_probs = outputs.log_probs * self.weights.to(outputs.log_probs)
        return outputs


class SourceLosses:
    """The mean loss of each source since the last log, in training and in evaluation, over all ranks."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # By mode and source: summed loss and trained tokens.
        self._sums: dict[str, dict[str, tuple[float, int]]] = {"train": {}, "eval": {}}

    def add(self, mode: str, inputs: Mapping[str, Any], log_probs: torch.Tensor) -> None:
        """Count a batch: `inputs` with its `sources`, `log_probs` `(B, L - 1)`."""
        documents, trained = documents_of_labels(inputs)
        size = len(inputs[SOURCES])
        sums = torch.zeros(size, device=log_probs.device, dtype=torch.float32)
        sums.index_add_(0, documents[trained], -log_probs[trained].float())
        counts = torch.bincount(documents[trained], minlength=size)
        for source, loss, count in zip(inputs[SOURCES], sums.tolist(), counts.tolist(), strict=False):
            _add_up(self._sums[mode], {source: (loss, count)})

    def read(self, mode: str) -> dict[str, float]:
        """Return the mean losses of all ranks by `loss/<source>` or `eval_loss/<source>`, and reset the counts."""
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
