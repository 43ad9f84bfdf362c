"""`RecutSteps`: run a step's pairs in other micro-batches than the padded run, with the padded run's loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from ...checking.modes import without_random_numbers
from ...comparison import Comparison
from ...data.steps import Plan, run_batch
from ...layout.padded_rows import rows_of, tell_rows
from ...override import set_inside
from ...parallel.ranks import summed
from ..packed_run import PackedRun
from ..padding_free.padding_free import models_of
from .cutting import PairWeight, Rows


class RecutSteps(PackedRun):
    """A packed run that re-cuts a TRL trainer's steps if it has a cutter. The loss must be a mean over pairs."""

    _rows: ClassVar[Rows]  # of a pair; set by each trainer

    # TRL's trainers assign these without a declaration.
    accelerator: Any
    neftune_noise_alpha: float | None

    _running: PairWeight | None = None
    _has_compared = False
    # Since the last log: TRL's metrics of this rank's micro-batches, as sums and weights.
    _measured: dict[str, np.ndarray]

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run TRL's training step for each micro-batch of a batch."""
        trl_step = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        if (step := getattr(inputs, "step", None)) is None:
            return trl_step(inputs)

        def run(micro_batch: Any) -> torch.Tensor:
            with set_inside(self, _running=micro_batch.origins):
                return trl_step(micro_batch)

        loss = run_batch(self, inputs, model, run)
        if step.is_last and not isinstance(self._cutter, Plan):  # tokens of images are counted as they train
            self.packing_reports |= self._cutter.reports
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
        metrics: dict[str, Any] = {mode: defaultdict(list) for mode in self._metrics}
        # Each rank measures its own pairs, of which others may have more; `log` adds them up.
        alone = dict.fromkeys(("gather", "gather_for_metrics"), lambda tensor, *_, **__: tensor)
        uncounted = {"_metrics": metrics, "_total_train_tokens": self._total_train_tokens}
        with set_inside(self.accelerator, **alone), set_inside(self, **uncounted):
            loss = by_trl(model, inputs, False, num_items_in_batch)
            if not self._has_compared:
                self._has_compared = True
                self._require_mean_over_pairs(partial(by_trl, model), inputs)
        self._count_tokens(inputs if part.weight else {}, before=self._total_train_tokens)
        metrics["train"].pop("num_tokens")
        for name, values in metrics["train"].items():
            self._measured[name] = self._measured.get(name, 0) + part.weight * np.array([values[-1], 1.0])
        return loss * part.weight

    @torch.no_grad()
    def _require_mean_over_pairs(self, loss_of: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> None:
        """Require that the loss of a micro-batch, without dropout, is the mean over its longer and shorter pairs."""
        if self._is_vision_dataset:  # the images of some of the pairs are not known
            return
        lengths = inputs["attention_mask"].sum(1).chunk(len(self._rows))[0]
        halves = lengths.argsort().tensor_split(2)
        with ExitStack() as silenced:
            for model in models_of(self).values():
                silenced.enter_context(without_random_numbers(model))
            # Every rank runs as many calls, for their collectives: a single pair runs in place of an empty half.
            whole, *both = (
                float(loss_of(_of_pairs(inputs, pairs if len(pairs) else halves[0], count=len(lengths))))
                for pairs in (torch.arange(len(lengths), device=lengths.device), *halves)
            )
        mean = sum(len(half) * loss for half, loss in zip(halves, both, strict=True)) / len(lengths)
        whole_precision = self.model.dtype is torch.float32 and not (self.args.bf16 or self.args.fp16)
        dtype = torch.float32 if whole_precision else torch.bfloat16
        losses = f"{whole:.6f} instead of {mean:.6f}"
        Comparison.of_means("re-cut loss", whole, mean, dtype, where=type(self).__name__, of=losses).require()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log TRL's metrics, of the micro-batches of all ranks."""
        if self._cutter is not None and self.model.training:  # TRL tells training from evaluation in the same way
            found, self._measured = summed(self.accelerator, self._measured), {}
            means = {name: [float(total / weight)] for name, (total, weight) in found.items() if weight}
            self._metrics["train"] |= means
            self._settle_tokens()
        super().log(logs, *args, **kwargs)


def _of_pairs(inputs: dict[str, Any], pairs: torch.Tensor, *, count: int) -> dict[str, Any]:
    """Return some pairs of a micro-batch of `count`, which has the first rows of all pairs, then all second rows."""
    chosen = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim():  # of each row, or of each pair
            value = torch.cat([of_row[pairs] for of_row in value.split(count)])
        chosen[name] = value
    return chosen
