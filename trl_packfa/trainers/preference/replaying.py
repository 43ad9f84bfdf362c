"""`Recorder` keeps a model's outputs for each row, and `Replay` returns them in the padded run's micro-batches.

TRL averages some metrics over the tokens of a micro-batch and then over micro-batches. For a re-cut step these
averages would differ. So TRL's own loss runs once more on the padded micro-batches, with the recorded outputs of the
model, and logs the padded run's metrics.

Shape letters: B rows of a batch, L row length, n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

# Outputs of TRL's fused LM head for each token `(B, L - 1)`, and of a classifier for each row `(B, 1)`.
_BY_TOKEN = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_BY_ROW = ("logits",)

RowOutputs = dict[str, torch.Tensor]


class Recorder:
    """A wrapper of a model that keeps the outputs of the last call. The model's attributes can be read here too."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward and keep its outputs."""
        self.outputs = self.model(*args, **kwargs)
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def rows(self, lengths: Sequence[int]) -> list[RowOutputs]:
        """Return the outputs of each row of `lengths` tokens, detached from the graph and without padding."""
        kept: list[RowOutputs] = []
        for i, length in enumerate(lengths):
            by_row = {name: value[i].detach().clone() for name, value in self._found(_BY_ROW)}
            by_token = {name: value[i, : length - 1].detach().clone() for name, value in self._found(_BY_TOKEN)}
            kept.append({**by_row, **by_token})
        return kept

    def _found(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        # The outputs of a fused head have no logits, and those of a classifier nothing per token.
        values = [(name, getattr(self.outputs, name, None)) for name in names]
        return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


class Replay:
    """A stand-in for a model that returns the recorded outputs of the next batch's rows, in its order."""

    def __init__(self, rows: list[RowOutputs], device: torch.device) -> None:
        self.rows, self.device = rows, device

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return outputs for `input_ids` `(B, L)`, padded with zeros on the right."""
        width = input_ids.shape[1] - 1
        answer: dict[str, Any] = {}
        for name, first in self.rows[0].items():
            size = first.shape if name in _BY_ROW else (width,)
            answer[name] = first.new_zeros((len(self.rows), *size), device=self.device)
            for i, row in enumerate(self.rows):
                answer[name][i, : len(row[name])] = row[name]
        return SimpleNamespace(**answer)
