"""What a model computed of each row, kept while a step runs and shown again in the padded run's micro-batches.

TRL averages some metrics over a micro-batch's tokens and then over micro-batches: of a step that was cut otherwise
these would be other numbers. So TRL's own loss runs once more on the padded micro-batches, on what the model has
computed already, and logs what it would have logged.

Shape letters: B rows of a batch, L row length, n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

# What TRL's fused LM head computes of each token `(B, L - 1)`, and a classifier of each row `(B, 1)`.
_BY_TOKEN = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_BY_ROW = ("logits",)

RowOutputs = dict[str, torch.Tensor]


class Recorder:
    """A model that is called as itself and remembers what came out last.

    Args:
        model (`torch.nn.Module`): the model, wrapped or not, whose attributes are found here too.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        self.outputs = self.model(*args, **kwargs)
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def rows(self, lengths: Sequence[int]) -> list[RowOutputs]:
        """Of each row of `lengths` tokens its outputs, apart from the graph, and nothing at pads."""
        kept: list[RowOutputs] = []
        for i, length in enumerate(lengths):
            by_row = {name: value[i].detach().clone() for name, value in self._found(_BY_ROW)}
            by_token = {name: value[i, : length - 1].detach().clone() for name, value in self._found(_BY_TOKEN)}
            kept.append({**by_row, **by_token})
        return kept

    def _found(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        # A fused head's outputs have no logits, and a classifier's nothing by token.
        values = [(name, getattr(self.outputs, name, None)) for name in names]
        return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


class Replay:
    """Stands in a model's place and answers with what was recorded of the rows of its next batch.

    Args:
        rows (`list[RowOutputs]`): of each row of the batch, in its order.
        device (`torch.device`): where answers lie.
    """

    def __init__(self, rows: list[RowOutputs], device: torch.device) -> None:
        self.rows, self.device = rows, device

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Outputs for `input_ids` `(B, L)`, padded on the right, zeros at pads."""
        width = input_ids.shape[1] - 1
        answer: dict[str, Any] = {}
        for name, first in self.rows[0].items():
            size = first.shape if name in _BY_ROW else (width,)
            answer[name] = first.new_zeros((len(self.rows), *size), device=self.device)
            for i, row in enumerate(self.rows):
                answer[name][i, : len(row[name])] = row[name]
        return SimpleNamespace(**answer)
