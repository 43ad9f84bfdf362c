"""`RecutSteps`: run a step's pairs in other micro-batches than the padded run, and log the padded run's metrics.

TRL averages some metrics over the tokens of a micro-batch and then over micro-batches, which would differ for a re-cut
step. So TRL's own loss runs once more, on the padded micro-batches and the recorded outputs of the model.

Shape letters: B rows of a batch, L row length, n tokens of a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object

from ...comparison import Comparison
from ...data.steps import Plan, run_batch
from ...layout.padded_rows import rows_of, tell_rows
from ...override import set_inside
from ..base.packed_run import PackedRun
from .cutting import PaddedPairs, PairPart, PairStep, Rows

# The key, in a row's outputs, of the reference's log-probability of its answer.
_REFERENCE = "reference"
# The attribute with which TRL reads the reference's log-probabilities, if it has any, from the batch.
_REFERENCES_IN_BATCH = {"precompute_ref_logps": True}


class RecutSteps(PackedRun):
    """A packed run that re-cuts a TRL trainer's steps if it has a cutter. The loss must be a mean over pairs."""

    # Set by each trainer: the rows of a pair, and the batch keys of the reference's log-probabilities for each row.
    _rows: ClassVar[Rows]
    _reference_keys: ClassVar[tuple[str, ...]] = ()

    # TRL's trainers assign these without a declaration.
    accelerator: Any
    compute_ref_log_probs: Callable[..., Any]
    ref_model: Any
    neftune_noise_alpha: float | None
    precompute_ref_logps: bool = False

    _running: PairPart | None = None
    _has_compared = False
    # While a step runs: the model's outputs for each row of a pair, by the pair's number in the step; the padded
    # micro-batches of this rank; the sum of the losses.
    _computed: dict[int, list[RowOutputs]]
    _padded: list[PaddedPairs]
    _trained: torch.Tensor

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run TRL's training step for each micro-batch of a batch; log each step as the padded run does."""
        trl_step = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        step = getattr(inputs, "step", None)
        if not isinstance(step, PairStep):
            return trl_step(inputs)
        if not step.number:
            self._computed, self._padded, self._trained = {}, [], torch.zeros((), device=self.args.device)

        def run(micro_batch: Any) -> torch.Tensor:
            with set_inside(self, _running=micro_batch.origins):
                return trl_step(micro_batch)

        loss = run_batch(self, inputs, model, run)
        self._padded += step.padded
        self._trained += loss
        if step.is_last:
            if not isinstance(self._cutter, Plan):  # tokens of images are counted as they train
                self.packing_reports |= self._cutter.reports
            self._log_as_padded()
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss; scale a re-cut micro-batch's loss by its share of the step's pairs."""
        if self._running is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        by_trl: Callable[..., torch.Tensor] = super().compute_loss  # type: ignore[assignment]  # no outputs are asked
        part = self._running
        if self.neftune_noise_alpha is not None:  # NEFTune's noise depends on the length of a padded row
            widths = np.tile(part.widths, len(self._rows))
            mask = inputs["attention_mask"]
            tell_rows(mask, replace(rows_of(mask), widths=tuple(widths.tolist()), memo={}))
        recorder, inputs = Recorder(model), {**inputs, **self._references(inputs)}
        gathers_nothing = dict.fromkeys(("gather", "gather_for_metrics"), lambda tensor, *_, **__: tensor)
        uncounted = {
            "_metrics": {mode: defaultdict(list) for mode in self._metrics},
            "_total_train_tokens": self._total_train_tokens,
        }
        # What TRL's loss counts is discarded: it is counted later, on padded micro-batches.
        # Ranks have different numbers of pairs here.
        alone = set_inside(self.accelerator, **gathers_nothing)
        with alone, set_inside(self, **uncounted, **_REFERENCES_IN_BATCH):
            loss = by_trl(recorder, inputs, False, num_items_in_batch)
        if part.weight:  # otherwise another rank trains these pairs
            self._keep(recorder, inputs, part)
        return loss * part.weight

    def _references(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the reference's log-probabilities as TRL's precomputed ones: `(n,)` for each row of n pairs."""
        if not self._reference_keys or self.precompute_ref_logps:
            return {}
        found = self.compute_ref_log_probs(self._reference_model(inputs), inputs)
        return dict(zip(self._reference_keys, found, strict=False))

    def _reference_model(self, inputs: dict[str, Any]) -> Any:
        """Return the model that computes the reference's log-probabilities of a batch, as a callable."""
        return self.ref_model or self.model

    def _keep(self, recorder: Recorder, inputs: dict[str, Any], part: PairPart) -> None:
        """Keep the outputs of each row of a micro-batch. It has the first rows of all pairs, then all second rows."""
        count = len(part.numbers)
        rows = recorder.rows(part.lengths.T.ravel().tolist())
        for at, pair in enumerate(part.numbers):
            of_pair = rows[at::count]
            for row, key in zip(of_pair, self._reference_keys, strict=False):
                row[_REFERENCE] = inputs[key][at]
            self._computed[pair] = of_pair

    def _log_as_padded(self) -> None:
        """Compute TRL's metrics on the padded run's micro-batches. The first time, compare their loss with ours."""
        by_trl: Callable[..., torch.Tensor] = super().compute_loss  # type: ignore[assignment]  # no outputs are asked
        computed, loss = self._computed, self._trained
        as_padded = torch.zeros_like(loss)
        if self.accelerator.num_processes > 1 and isinstance(self._cutter, Plan):  # others have run some of the pairs
            mine = {
                pair: [{name: value.cpu() for name, value in row.items()} for row in rows]
                for pair, rows in computed.items()
            }
            computed = {pair: rows for of_rank in gather_object([mine]) for pair, rows in of_rank.items()}
        for pairs, batch in self._padded:
            batch = self._prepare_inputs(batch)
            rows = [computed[pair][row] for row in range(len(self._rows)) for pair in pairs]
            if keys := self._reference_keys:
                references = torch.stack([row.pop(_REFERENCE) for row in rows]).to(loss.device)
                batch |= dict(zip(keys, references.chunk(len(keys)), strict=True))
            with torch.no_grad(), self.compute_loss_context_manager(), set_inside(self, **_REFERENCES_IN_BATCH):
                as_padded += by_trl(Replay(rows, loss.device), batch) / len(self._padded)
        self._computed, self._padded = {}, []
        if not self._has_compared:
            self._has_compared = True
            self._require_same_loss(loss, as_padded)

    def _require_same_loss(self, loss: torch.Tensor, as_padded: torch.Tensor) -> None:
        both: Any = self.accelerator.reduce(torch.stack([loss.detach(), as_padded]).float(), "mean")
        trained, padded = both.tolist()
        whole_precision = self.model.dtype is torch.float32 and not (self.args.bf16 or self.args.fp16)
        dtype = torch.float32 if whole_precision else torch.bfloat16
        losses = f"{trained:.6f} instead of {padded:.6f}"
        found = Comparison.of_means("re-cut loss", trained, padded, dtype, where=type(self).__name__, of=losses)
        if not math.isnan(found.difference):  # re-cutting does not cause it
            found.require()


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
        kept: list[RowOutputs] = [{} for _ in lengths]
        for name in (*_BY_ROW, *_BY_TOKEN):
            # The outputs of a fused head have no logits, and those of a classifier nothing per token.
            if isinstance(value := getattr(self.outputs, name, None), torch.Tensor):
                for i, (row, length) in enumerate(zip(kept, lengths, strict=True)):
                    row[name] = (value[i] if name in _BY_ROW else value[i, : length - 1]).detach().clone()
        return kept


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
