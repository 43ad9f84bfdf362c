"""`packing_strategy="step"` on images: each rank re-cuts its own examples of an optimizer step.

Sizes are gathered over ranks, images never: an example stays on its rank. A micro-batch is a padded one, made of the
processed examples.

Shape letters: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..common.image_cutting import OwnCutter
from ..common.image_examples import Merging
from ..common.image_rows import Example
from ..common.step_cutting import Documents, Slot
from ..padding_free.collating import CountingCollator
from .config import PackedSFTConfig

# The key of a micro-batch's weights of rows, `(B,)`. It is removed before the model is called.
ROW_WEIGHTS = "trl_packfa_row_weights"


class ImageCutter:
    """A cutter of a step's examples into micro-batches of about equal cost, the same number of them on every rank.

    A micro-batch's size is its tokens plus its image patches, weighted ([`ImageWeights`]). The budget is
    `max_tokens_per_microbatch`, or the size of the step's largest padded micro-batch, with its pads.

    `counts_tokens`: losses are divided by the tokens of the step. If not, the padded run's loss is a mean over each
    padded micro-batch, and rows get weights ([`ROW_WEIGHTS`]) with which the step's loss is the same.
    """

    def __init__(
        self,
        args: PackedSFTConfig,
        *,
        model: Any,
        accelerator: Accelerator,
        pad_token_id: int,
        counts_tokens: bool,
    ) -> None:
        self.own = OwnCutter(model, accelerator, budget=args.max_tokens_per_microbatch)
        self.counts_tokens, self.pad_token_id = counts_tokens, pad_token_id
        self.free_budget: int | None = args.max_tokens_per_microbatch  # without one: that of the last step
        self._collator: CountingCollator | None = None
        # The largest micro-batch of the last step, and the batch of its last example.
        self.sample: tuple[dict[str, Any], dict[str, Any]] | None = None

    def cut(self, batches: Sequence[Documents], collate: Callable[[list[Example]], Any]) -> list[Slot]:
        """Re-cut a step; return one slot per padded micro-batch. The last slot holds the step, the others are idle."""
        cut = self.own.cut(batches)
        self.free_budget = cut.budget
        merge = self._merging(collate)
        # A rank with fewer examples than the others have micro-batches runs an untrained one, to take part in their
        # collectives.
        idle = merge([cut.examples[cut.shortest]])
        idle["labels"] = torch.full_like(idle["labels"], -100)
        first = cut.count - len(cut.parts)
        micro_batches = [*[idle] * first, *(merge([cut.examples[i] for i in part]) for part in cut.parts)]
        largest = max(range(len(cut.parts)), key=lambda i: len(cut.parts[i]))
        self.sample = dict(micro_batches[first + largest]), cut.examples[cut.parts[largest][-1]].batch
        if not self.counts_tokens:
            trained = np.array([example.trained for example in cut.examples])
            weights = _row_weights(trained, cut.padded, cut.parts, cut.count)
            for micro_batch, of_rows in zip(micro_batches[first:], weights, strict=True):
                micro_batch[ROW_WEIGHTS] = of_rows
        last = Slot(micro_batches, cut.imbalance, untrained=cut.untrained)
        return [Slot([]) for _ in batches[:-1]] + [last]

    def _merging(self, collate: Callable[[list[Example]], Any]) -> CountingCollator:
        if self._collator is None:
            self._collator = CountingCollator(Merging(collate, self.pad_token_id))
        return self._collator


def _row_weights(trained: np.ndarray, padded: np.ndarray, parts: list[list[int]], count: int) -> list[torch.Tensor]:
    """Return, for each micro-batch, the weights of its rows with which the mean of its losses is as padded.

    The padded run's loss is the mean over its micro-batches of the mean over their trained tokens. Ours is the mean
    over `count` micro-batches, untrained ones included, of the weighted mean over theirs. `trained` and `padded` are
    the trained tokens of each example and the number of its padded micro-batch; `parts` are the examples of each
    micro-batch.
    """
    # Example: padded micro-batches with 3 and 9 trained tokens run as one with 12. A token of the first weighs
    # 12 / 3 / 2, so that its share of the sum, divided by 12, is 1 / 3 / 2.
    in_padded = np.maximum(np.bincount(padded, weights=trained), 1)
    share = count / len(in_padded)
    return [torch.tensor(trained[part].sum() * share / in_padded[padded[part]], dtype=torch.float32) for part in parts]
