"""Training on images: the model computes padded micro-batches without their pads, and steps are re-cut.

A processor makes the tokens of an image while it collates. So rows cannot be filled before, and the text decoder
removes the pads after images and text are merged. Each rank re-cuts its own examples of a step: sizes are gathered
over ranks, images never.

Shape letters: B rows, L row length, n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from trl import SFTTrainer

from ...checking import without_random_numbers
from ...checking.compare import relative_difference
from ...checking.rounding import last_places_off
from ...checking.subject import compute_dtype
from ...comparison import TOLERANCES, Comparison
from ...config.sft import PackedSFTConfig
from ...data.batching import FREE
from ...data.collating import CountedBatch
from ...data.image_examples import OwnCutter, Processed, why_images_stay
from ...data.image_rows import Example
from ...data.step_cutting import how_to_cut, keep_padded
from ...data.steps import CutStep, Part
from ...packing import STEP
from ...parallel.ranks import agree
from ..packed_run import HOOKS, PackedRun
from ..padding_free.padding_free import run_without_pads

logger = get_logger(__name__)

# The key of a micro-batch's weights of rows, `(B,)`. It is removed before the model is called.
ROW_WEIGHTS = "trl_packfa_row_weights"


class TrainsOnImages(PackedRun, SFTTrainer):
    """TRL's `SFTTrainer`, and what a run on images needs more: a cutter of steps, and its check."""

    _tokenizer: Any
    _recut_is_checked = False

    def run_images_without_pads(self, strategy: str) -> None:
        """Make a trainer that was built without packing compute no pads, see [`padding_free`], and re-cut steps."""
        args: PackedSFTConfig = self.args
        self.name_rows()
        run_without_pads(self, check_first_batch=args.check_packing, **args.patch_options)
        if strategy != STEP.name:
            return
        if why := self._why_images_stay():
            keep_padded(args, why)
        else:
            self._cutter = ImageCutter(self)

    def _why_images_stay(self) -> str:
        """Return the reason why re-cut steps would train another loss; `""` if there is none."""
        args: PackedSFTConfig = self.args
        # Examples stay on their rank, and rows are weighted where the loss is a mean over each padded micro-batch.
        cut, why = how_to_cut(
            args, balances_experts=self.aux_loss_enabled, own_loss=self.compute_loss_func is not None
        )
        if cut != FREE:
            return why
        if hook := self.replaced(*HOOKS):
            return hook
        weighted = args.loss_type == "nll" and not args.label_smoothing_factor and args.loss_weighting == "token"
        if not (self.model_accepts_loss_kwargs or weighted):
            return "the model's forward takes no num_items_in_batch, and the loss is not a sum over trained tokens"
        if self._own_collator:
            return "data_collator makes the batches, and they may depend on which examples are together"
        return why_images_stay(self.model, self.neftune_noise_alpha)

    def _why_kept(self) -> str:
        return self._why_images_stay() if isinstance(self._cutter, ImageCutter) else super()._why_kept()

    def check_recut_images(self, model: Any) -> None:
        """Compare an example of the first re-cut step with the example alone, unless `check_packing` is off."""
        cutter = self._cutter
        if not isinstance(cutter, ImageCutter) or cutter.sample is None:
            return
        (together, alone), cutter.sample = cutter.sample, None
        if not self.args.check_packing or self._recut_is_checked:
            return
        self._recut_is_checked = True

        def compare() -> None:
            with self.compute_loss_context_manager():
                _require_same_losses(model, together, alone, self._prepare_inputs)

        agree(self.accelerator, compare)


class ImageCutter(OwnCutter):
    """A cutter of a step's examples into micro-batches of about equal cost, the same number of them on every rank.

    Losses may be divided by the tokens of the step. If not, the padded run's loss is a mean over each padded
    micro-batch, and rows get weights ([`ROW_WEIGHTS`]) with which the step's loss is the same.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.trainer = trainer
        # The largest micro-batch of the last step; its batch, and that of its last example.
        self._largest: Part | None = None
        self.sample: tuple[dict[str, Any], dict[str, Any]] | None = None

    def cut(self, batches: Sequence[list[Processed]]) -> CutStep:
        """Cut a step, given by padded micro-batch, with the weights of rows where they are needed."""
        own = self.cut_own(batches)
        trained = np.array([example.trained for example in own.examples])
        weights = [None] * len(own.parts)
        if not self.trainer.model_accepts_loss_kwargs:
            weights = _row_weights(trained, own.padded, own.parts)
        parts = [own.part(numbers, of_rows) for numbers, of_rows in zip(own.parts, weights, strict=True)]
        self._largest = max(parts, key=lambda part: 0 if part.is_idle else len(part.examples))
        return CutStep(parts, own.imbalance)

    def collated(self, part: Part, collate: Callable[[list[Example]], Any]) -> CountedBatch:
        """Collate a micro-batch of processed examples."""
        batch = super().collated(part._replace(facts=None), collate)
        if part is self._largest:
            self.sample = dict(batch), part.examples[-1].batch
        if part.is_idle:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        elif part.facts is not None:
            batch[ROW_WEIGHTS] = part.facts
        return batch


def _row_weights(trained: np.ndarray, padded: np.ndarray, parts: list[list[int]]) -> list[torch.Tensor]:
    """Return, for each micro-batch, the weights of its rows with which the mean of its losses is as padded.

    The padded run's loss is the mean over its micro-batches of the mean over their trained tokens. Ours is the mean
    over all micro-batches, untrained ones included, of the weighted mean over theirs. `padded` is the number of each
    example's padded micro-batch.
    """
    # Example: padded micro-batches with 3 and 9 trained tokens run as one with 12. A token of the first weighs
    # 12 / 3 / 2, so that its share of the sum, divided by 12, is 1 / 3 / 2.
    in_padded = np.maximum(np.bincount(padded, weights=trained), 1)
    share, weights = len(parts) / len(in_padded), []
    for part in parts:
        numbers = np.array(part, dtype=np.int64)
        weights.append(torch.tensor(trained[numbers].sum() * share / in_padded[padded[numbers]], dtype=torch.float32))
    return weights


@torch.no_grad()
def _require_same_losses(
    model: Any, together: dict[str, Any], alone: dict[str, Any], prepare: Callable[[Any], Any]
) -> None:
    """Require that the last example of a micro-batch has the losses in it that it has alone, without dropout.

    `model`, wrapped or not, has TRL's fused LM head. In `alone`, tokens begin in the first column. `prepare` moves a
    batch to the device. The decoder's rows are checked apart ([`compare_padded_batch`]). This check runs the whole
    model, so it also finds a vision tower that mixes the images of a micro-batch, and merged images that belong to
    another example.
    """

    def losses(batch: dict[str, Any], *, off: bool = False) -> torch.Tensor:
        with last_places_off(model) if off else nullcontext():
            return model(**prepare(dict(batch)), use_cache=False, fused_lm_head=True).log_probs[-1]

    with without_random_numbers(model, training=True):
        apart, own, rounded = losses(together), losses(alone), losses(alone, off=True)
    # All tokens together are one vector `(1, n)`: the loss of a single token may be near 0.
    apart, own, rounded = (values[: len(own)][None] for values in (apart, own, rounded))
    off, noise = (relative_difference(values, own) for values in (apart, rounded))
    least, rows = TOLERANCES[compute_dtype(model, own.dtype)].outputs, str(len(together["input_ids"]))
    found = Comparison.beside_rounding("images", off, noise, least, of=rows)
    found.require()
    logger.info("trl-packfa: %s", found)
