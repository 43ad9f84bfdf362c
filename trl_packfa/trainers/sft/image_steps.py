"""`packing_strategy="step"` on images: each rank re-cuts its own examples of an optimizer step.

The loader's workers process each example alone, so its tokens and image patches are known before the step is cut.
Sizes are gathered over ranks, images never: an example stays on its rank. A micro-batch is a padded one, made of the
processed examples. It is the processor's own batch: where merging would not give that, the processor makes it.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...packing import PackingReport, document_cost, fewest_micro_batches, imbalance, recut
from ..common.flops import quadratic_weight
from ..common.image_rows import Example, NamingCollator, rejected
from ..common.image_weights import ImageWeights
from ..common.step_cutting import Documents, Slot
from ..padding_free.collating import CountingCollator
from .config import PackedSFTConfig

logger = get_logger(__name__)

# The key of a micro-batch's weights of rows, `(B,)`. It is removed before the model is called.
ROW_WEIGHTS = "trl_packfa_row_weights"
# Values at pads, by the key of a batch; 0 for all others.
_PADS = {"labels": -100}


@dataclass(frozen=True)
class Processed:
    """An example, and TRL's batch of it alone.

    Attributes:
        row (`dict`): the example.
        batch (`dict`): its batch, of one row.
        tokens (`int`): its true tokens, those of images included.
        patches (`float`): the patches of its images.
        trained (`int`): its trained tokens.
        image_tokens (`int`): its tokens that stand for images.
    """

    row: Example
    batch: dict[str, Any]
    tokens: int
    patches: float
    trained: int
    image_tokens: int

    @property
    def width(self) -> int:
        """The length of its row in the batch."""
        return self.batch["input_ids"].shape[1]


class OneByOne:
    """A collator that processes each example alone. The loader's workers run it.

    Args:
        collator ([`NamingCollator`]):
            TRL's collator.
        weights ([`ImageWeights`]):
            Counts the image patches of a batch.
    """

    def __init__(self, collator: NamingCollator, weights: ImageWeights) -> None:
        self.collator, self.weights = collator, weights

    def __call__(self, examples: Sequence[Example]) -> Documents:
        """Process each example.

        Raises:
            [`InvalidDataset`]: with the row that has no image, that the processor rejects, or that `max_length` cuts
                through an image.
        """
        return Documents([self._processed(example) for example in examples])

    def _processed(self, example: Example) -> Any:
        batch = dict(self.collator([example]))
        tokens = int(batch["attention_mask"].sum())
        longest = getattr(self.collator.collator, "max_length", None)  # a user's own collator has none
        if longest is not None and tokens >= longest:
            self._refuse_cut_image(example, batch, longest)
        trained = int((batch["labels"][:, 1:] != -100).sum())  # the first token is never predicted
        image = self._image_token
        image_tokens = 0 if image is None else int((batch["input_ids"] == image).sum())
        return Processed(example, batch, tokens, self.weights.count(batch), trained, image_tokens)

    @property
    def _image_token(self) -> int | None:
        """The token that stands for a part of an image, `None` if the processor names none."""
        # A user's own collator has no processor.
        return getattr(getattr(self.collator.collator, "processor", None), "image_token_id", None)

    def _refuse_cut_image(self, example: Example, batch: dict[str, Any], longest: int) -> None:
        """Refuse an example whose image tokens `max_length` cuts. TRL cuts tokens, but no pixels."""
        image = self._image_token
        if image is None:
            return
        uncut = copy.copy(self.collator)
        uncut.collator = copy.copy(self.collator.collator)
        uncut.collator.max_length = None
        kept, whole = (int((found["input_ids"] == image).sum()) for found in (batch, uncut([example])))
        if kept < whole:
            raise rejected(example, f"max_length={longest} leaves {kept} of its {whole} image tokens")


class Merging:
    """A maker of micro-batches of [`Processed`] examples.

    The first micro-batch of each kind is compared with the processor's own batch. If they differ, the processor makes
    all batches of this kind. Examples are of one kind if their batches have the same keys.

    Args:
        collate (`Callable`):
            TRL's collator, with the processor.
        pad_token_id (`int`):
            Token at pads.
    """

    def __init__(self, collate: Callable[[list[Example]], Any], pad_token_id: int) -> None:
        self.collate, self.pads = collate, {**_PADS, "input_ids": pad_token_id}
        self.is_equal: dict[frozenset[frozenset[str]], bool] = {}

    def __call__(self, examples: Sequence[Processed]) -> dict[str, Any]:
        """Return the processor's batch of these examples."""
        if len(examples) == 1:
            return dict(examples[0].batch)
        kind = frozenset(frozenset(example.batch) for example in examples)
        merged = self._merged([example.batch for example in examples]) if self.is_equal.get(kind, True) else None
        if merged is not None and kind in self.is_equal:
            return merged
        own = dict(self.collate([example.row for example in examples]))
        if merged is not None:
            self.is_equal[kind] = _equal(merged, own)
            if not self.is_equal[kind]:
                logger.info("trl-packfa: the processor's batches depend on their examples: they are processed twice.")
        return own

    def _merged(self, batches: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Join batches of one row each: values by token are padded on the right, others follow each other.

        The result is `None` if some do not fit together.
        """
        widths = [batch["input_ids"].shape[1] for batch in batches]
        merged = {}
        for key in dict.fromkeys(key for batch in batches for key in batch):
            values = [batch.get(key) for batch in batches]
            there = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
            if len(there) < sum(key in batch for batch in batches):
                return None
            by_token = all(
                value is not None and value.shape == (1, width) for value, width in zip(values, widths, strict=True)
            )
            if by_token:
                pad = self.pads.get(key, 0)
                there = [torch.nn.functional.pad(v, (0, max(widths) - v.shape[1]), value=pad) for v in there]
            if len({value.shape[1:] for value in there}) > 1:
                return None
            merged[key] = torch.cat(there)
        return merged


def _equal(merged: dict[str, Any], own: dict[str, Any]) -> bool:
    return merged.keys() == own.keys() and all(
        isinstance(own[key], torch.Tensor) and value.dtype == own[key].dtype and torch.equal(value, own[key])
        for key, value in merged.items()
    )


class RankStep(NamedTuple):
    """The examples of one rank in a step, in numbers.

    Attributes:
        largest_padded (`int`): size of its largest padded micro-batch, in tokens.
        sizes (`np.ndarray`): size of each example, patches counted as tokens.
        cost (`float`): arithmetic of all examples.
        shortest (`int`): tokens of its shortest example.
        counts (`np.ndarray`): examples, tokens, trained tokens and image tokens, `(4,)`.
    """

    largest_padded: int
    sizes: np.ndarray
    cost: float
    shortest: int
    counts: np.ndarray


class ImageCutter:
    """A cutter of a step's examples into micro-batches of about equal cost, the same number of them on every rank.

    A micro-batch's size is its tokens plus its image patches, weighted ([`ImageWeights`]). The budget is
    `max_tokens_per_microbatch`, or the size of the step's largest padded micro-batch, with its pads.

    Args:
        args ([`PackedSFTConfig`]):
            The run's config.
        model (`torch.nn.Module`):
            Its shape decides the weights of image patches and attention.
        accelerator (`Accelerator`):
            Gathers the sizes of all ranks.
        pad_token_id (`int`):
            Token at pads.
        counts_tokens (`bool`):
            Whether losses are divided by the tokens of the step. If not, the padded run's loss is a mean over each
            padded micro-batch, and rows get weights ([`ROW_WEIGHTS`]) with which the step's loss is the same.

    Attributes:
        seen (`np.ndarray`): examples, tokens, trained tokens and image tokens of all ranks so far, `(4,)`.
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
        self.accelerator, self.asked, self.counts_tokens = accelerator, args.max_tokens_per_microbatch, counts_tokens
        self.weights, self.quadratic = ImageWeights.of(model), quadratic_weight(model)
        self.pad_token_id = pad_token_id
        self.free_budget: int | None = self.asked  # without one: that of the last step
        self._collator: CountingCollator | None = None
        self.seen = np.zeros(4, dtype=np.int64)
        # The largest micro-batch of the last step, and the batch of its last example.
        self.sample: tuple[dict[str, Any], dict[str, Any]] | None = None

    def cut(self, batches: Sequence[Documents], collate: Callable[[list[Example]], Any]) -> list[Slot]:
        """Re-cut a step; return one slot per padded micro-batch. The last slot holds the step, the others are idle."""
        examples: list[Any] = [example for batch in batches for example in batch.examples]
        padded = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        tokens, patches, widths, trained, image_tokens = (
            np.array([getattr(example, name) for example in examples])
            for name in ("tokens", "patches", "width", "trained", "image_tokens")
        )
        # Rounded up, so that a padded micro-batch always fits the budget that is made of it.
        sizes = np.ceil(tokens + self.weights.size * patches).astype(np.int64)
        cost = document_cost(tokens, self.quadratic) + self.weights.cost * patches
        pads = np.array([widths[padded == group].max() for group in padded]) - tokens
        counts = np.array([len(examples), tokens.sum(), trained.sum(), image_tokens.sum()])
        largest_padded = int(np.bincount(padded, weights=sizes + pads).max())
        mine = RankStep(largest_padded, sizes, float(cost.sum()), int(tokens.min()), counts)
        ranks: list[RankStep] = [mine] if self.accelerator.num_processes == 1 else gather_object([mine])
        self.seen += sum(rank.counts for rank in ranks)
        budget = self.free_budget = self.asked or max(rank.largest_padded for rank in ranks)
        count = max(fewest_micro_batches(rank.sizes, budget) for rank in ranks)
        if self.asked is None and count > len(batches):  # best fit does not always find the fewest
            count, parts = len(batches), [np.flatnonzero(padded == group).tolist() for group in range(len(batches))]
        else:
            parts = recut(sizes, cost=cost, budget=budget, num_micro_batches=min(count, len(examples)))
        # The last micro-batch of a step reduces gradients over ranks. DDP leaves out a vision tower that no rank runs
        # then, so micro-batches with images come last.
        parts.sort(key=lambda part: (bool(patches[part].any()), -cost[part].sum()))
        merge = self._merging(collate)
        # A rank with fewer examples than the others have micro-batches runs an untrained one, to take part in their
        # collectives.
        idle = merge([examples[int(tokens.argmin())]])
        idle["labels"] = torch.full_like(idle["labels"], -100)
        micro_batches = [*[idle] * (count - len(parts)), *(merge([examples[i] for i in part]) for part in parts)]
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        self.sample = dict(micro_batches[count - len(parts) + largest]), examples[parts[largest][-1]].batch
        if not self.counts_tokens:
            weights = _row_weights(trained, padded, parts, count)
            for micro_batch, of_rows in zip(micro_batches[count - len(parts) :], weights, strict=True):
                micro_batch[ROW_WEIGHTS] = of_rows
        last = Slot(
            micro_batches,
            imbalance([[[rank]] for rank in range(len(ranks))], np.array([rank.cost for rank in ranks])),
            untrained=sum(max(count - len(rank.sizes), 0) * rank.shortest for rank in ranks),
        )
        return [Slot([]) for _ in batches[:-1]] + [last]

    @property
    def report(self) -> PackingReport:
        """Counts of the examples that have trained so far: their tokens exist only after collation."""
        return PackingReport.of_seen(*self.seen.tolist())

    def _merging(self, collate: Callable[[list[Example]], Any]) -> CountingCollator:
        if self._collator is None:
            self._collator = CountingCollator(Merging(collate, self.pad_token_id))
        return self._collator


def _row_weights(trained: np.ndarray, padded: np.ndarray, parts: list[list[int]], count: int) -> list[torch.Tensor]:
    """Return, for each micro-batch, the weights of its rows with which the mean of its losses is as padded.

    The padded run's loss is the mean over its micro-batches of the mean over their trained tokens. Ours is the mean
    over `count` micro-batches of the weighted mean over theirs.

    Args:
        trained (`np.ndarray`), padded (`np.ndarray`):
            Trained tokens of each example, and the number of its padded micro-batch.
        parts (`list[list[int]]`):
            The examples of each micro-batch.
        count (`int`):
            Number of micro-batches that run, untrained ones included.
    """
    # Example: padded micro-batches with 3 and 9 trained tokens run as one with 12. A token of the first weighs
    # 12 / 3 / 2, so that its share of the sum, divided by 12, is 1 / 3 / 2.
    in_padded = np.maximum(np.bincount(padded, weights=trained), 1)
    share = count / len(in_padded)
    return [torch.tensor(trained[part].sum() * share / in_padded[padded[part]], dtype=torch.float32) for part in parts]
