"""Steps that run their pairs in other micro-batches than the padded run, and log what it would have logged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from ..errors import ContaminationError
from ..runtime.padded_rows import rows_of, tell_rows
from ..training.step_packing import Documents, in_turn, require_aligned
from .alone import alone
from .collating import CountedBatch
from .cutting import PairCutter, PairSlot, Part
from .overflow import Rows
from .replaying import Recorder, Replay, RowOutputs

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

# Under which a micro-batch says what it holds, until it runs.
_PART = "trl_packfa_part"
# Among a row's outputs, the reference's log-probability of its answer.
_REFERENCE = "reference"
# Largest relative difference that rounding makes of a mean over the same losses, in float32 and below.
_SAME_LOSS, _SAME_HALF_LOSS = 1e-4, 2e-2


class RecutSteps(Base):
    """The steps of a trainer of TRL's whose loss is a mean over pairs, where it has a [`PairCutter`]; else TRL's.

    Each micro-batch's loss is TRL's, weighted by its pairs; when all have run, TRL's loss runs once more on the padded
    run's micro-batches and what the model has computed ([`Replay`]), for its metrics.
    """

    # Of each trainer: the rows of a pair, and the batch keys of the reference's log-probabilities of each row.
    _rows: ClassVar[Rows]
    _reference_keys: ClassVar[tuple[str, ...]] = ()

    # What the Trainer declares more loosely, and what TRL's trainers assign.
    args: Any
    model: Any
    data_collator: Any
    neftune_noise_alpha: float | None
    precompute_ref_logps: bool
    _metrics: Any
    _total_train_tokens: int

    _cutter: PairCutter | None = None
    _running: tuple[PairSlot, Part] | None = None
    _has_compared = False
    # By number of a step's pair, while the step runs: of each of its rows what the model computed.
    _computed: dict[int, list[RowOutputs]]

    def get_train_dataloader(self) -> DataLoader:
        """Where steps are cut, the padded run's pairs in its order, collated once the step is cut."""
        if self._cutter is None:
            return super().get_train_dataloader()
        collator, self.data_collator = self.data_collator, Documents  # the loader reads the attribute
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = collator

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of one optimizer step."""
        if self._cutter is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = list(islice(epoch_iterator, num_batches))  # `Documents`, not collated
        slots = self._cutter.cut(batches, self.data_collator) if batches else []
        for slot in slots:
            for micro_batch, part in zip(slot.micro_batches, slot.parts, strict=True):
                micro_batch[_PART] = part
        return slots, None

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's training step; for the slot that holds a whole optimizer step, one per micro-batch."""
        if not isinstance(inputs, PairSlot):
            return super().training_step(model, inputs, num_items_in_batch)
        require_aligned(inputs, self.accelerator, self.args.gradient_accumulation_steps)
        loss = torch.zeros((), device=self.args.device)  # all that an idle slot has
        if not inputs.micro_batches:
            return loss
        self._computed, syncs_itself = {}, self.is_deepspeed_enabled
        for micro_batch in in_turn(inputs, accelerator=self.accelerator, model=model, syncs_itself=syncs_itself):
            self._running = inputs, micro_batch.pop(_PART)
            try:
                loss += super().training_step(model, micro_batch, num_items_in_batch)
            finally:
                self._running = None
        self._log_as_padded(inputs, loss)
        return loss

    def _prepare_input(self, data: Any) -> Any:
        # The loader moves the batches that it makes; those of a re-cut step are made here.
        return super()._prepare_input(data.to(self.args.device) if isinstance(data, CountedBatch) else data)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss; of a re-cut micro-batch what it counts of the padded run's."""
        if self._running is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        by_trl: Callable[..., torch.Tensor] = super().compute_loss  # type: ignore[assignment]  # no outputs are asked
        slot, part = self._running
        if self.neftune_noise_alpha is not None:  # whose noise follows the length of a padded row
            widths = np.tile(slot.widths[list(part.pairs)], len(self._rows))
            mask = inputs["attention_mask"]
            tell_rows(mask, replace(rows_of(mask), widths=tuple(widths.tolist()), memo={}))
        recorder, inputs = Recorder(model), {**inputs, **self._references(inputs)}
        metrics, tokens = self._metrics, self._total_train_tokens
        # Ranks have other numbers of pairs here, which cannot be gathered, and metrics are those of the padded run's
        # micro-batches.
        self._metrics = {mode: defaultdict(list) for mode in metrics}
        try:
            with alone(self), self._knowing_references():
                loss = by_trl(recorder, inputs, False, num_items_in_batch)
        finally:
            self._metrics, self._total_train_tokens = metrics, tokens
        if part.weight:  # else another rank runs these pairs
            self._keep(recorder, inputs, slot, part)
        return loss * part.weight

    def _references(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The reference's log-probabilities as TRL's precomputed ones, `(n,)` of each row of n pairs."""
        trl: Any = self
        if not self._reference_keys or trl.precompute_ref_logps:
            return {}
        found = trl.compute_ref_log_probs(trl.ref_model or trl.model, inputs)
        return dict(zip(self._reference_keys, found, strict=False))

    @contextmanager
    def _knowing_references(self) -> Iterator[None]:
        """For the length of a `with` block TRL takes the reference's log-probabilities from the batch."""
        if not self._reference_keys:
            yield
            return
        before, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            yield
        finally:
            self.precompute_ref_logps = before

    def _keep(self, recorder: Recorder, inputs: dict[str, Any], slot: PairSlot, part: Part) -> None:
        """Remember what came out of each row of a micro-batch, whose rows are all first ones, then all second ones."""
        pairs, count = list(part.pairs), len(part.pairs)
        rows = recorder.rows(slot.lengths[pairs].T.ravel().tolist())
        for at, pair in enumerate(pairs):
            of_pair = rows[at::count]
            for row, key in zip(of_pair, self._reference_keys, strict=False):
                row[_REFERENCE] = inputs[key][at]
            self._computed[pair] = of_pair

    def _log_as_padded(self, slot: PairSlot, loss: torch.Tensor) -> None:
        """TRL's metrics of the padded run's micro-batches; the first time, their loss is held against what trained.

        Raises:
            [`ContaminationError`]: if they differ.
        """
        by_trl: Callable[..., torch.Tensor] = super().compute_loss  # type: ignore[assignment]  # no outputs are asked
        computed, as_padded = self._computed_on_all_ranks(), torch.zeros_like(loss)
        self._computed = {}
        for pairs in slot.padded:
            batch = self._prepare_inputs(self.data_collator([slot.examples[pair] for pair in pairs]))
            rows = [computed[pair][row] for row in range(len(self._rows)) for pair in pairs]
            references = torch.stack([row.pop(_REFERENCE) for row in rows]) if self._reference_keys else None
            if references is not None:
                chunks = references.to(loss.device).chunk(len(self._reference_keys))
                batch |= dict(zip(self._reference_keys, chunks, strict=True))
            with torch.no_grad(), self.compute_loss_context_manager(), self._knowing_references():
                as_padded += by_trl(Replay(rows, loss.device), batch) / len(slot.padded)
        self._metrics["train"]["micro_batches"].append(len(slot.micro_batches))
        self._metrics["train"]["imbalance"].append(slot.imbalance)
        if not self._has_compared:
            self._has_compared = True
            self._require_same_loss(loss, as_padded)

    def _computed_on_all_ranks(self) -> dict[int, list[RowOutputs]]:
        if self.accelerator.num_processes == 1:
            return self._computed
        mine = {
            pair: [{name: value.cpu() for name, value in row.items()} for row in rows]
            for pair, rows in self._computed.items()
        }
        return {pair: rows for of_rank in gather_object([mine]) for pair, rows in of_rank.items()}

    def _require_same_loss(self, loss: torch.Tensor, as_padded: torch.Tensor) -> None:
        both: Any = self.accelerator.reduce(torch.stack([loss.detach(), as_padded]).float(), "mean")
        trained, padded = both.tolist()
        whole_precision = self.model.dtype is torch.float32 and not (self.args.bf16 or self.args.fp16)
        allowed = _SAME_LOSS if whole_precision else _SAME_HALF_LOSS
        # Written so that a loss that is no number passes: it is no matter of the cut.
        if abs(trained - padded) > allowed * max(1.0, abs(padded)):
            raise ContaminationError(
                f"{type(self).__name__}: the first step's loss is {trained:.6f} re-cut and {padded:.6f} in the padded "
                "run's micro-batches.",
                why=["this loss is no mean over pairs: re-cut, another one would be trained"],
                do="Train with packing_strategy='minibatch', and please report it.",
            )
