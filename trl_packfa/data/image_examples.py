"""Examples with images, processed one by one, and batches made of them.

The loader's workers process each example alone, so its tokens and image patches are known before a step is cut. A
micro-batch is the processor's own batch: where joining the examples' batches would not give that, the processor makes
it. Each rank cuts its own examples; only their sizes are gathered over ranks.

Shape letters: B rows, L row length, R rows of an example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn

from ..comparison import Comparison
from ..packing import PackingReport, document_cost, fewest_micro_batches, recut
from ..patching.inspect import inner_model, text_decoder
from .collating import CountedBatch, CountingCollator
from .flops import quadratic_weight
from .image_rows import Example, NamingCollator, rejected
from .steps import Part, ReadCutter

logger = get_logger(__name__)

# Values at pads, by the key of a batch; 0 for all others.
_PADS = {"labels": -100}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Processed:
    """An example, and TRL's batch of it alone."""

    row: Example
    batch: dict[str, Any]  # one row, or the rows of a pair
    lengths: np.ndarray  # true tokens of its rows, those of images included, `(R,)`
    patches: float  # of its images
    trained: int  # tokens
    image_tokens: int  # tokens that stand for images

    @property
    def tokens(self) -> int:
        """The true tokens of all its rows."""
        return int(self.lengths.sum())

    @property
    def width(self) -> int:
        """The length of its rows in the batch."""
        return self.batch["input_ids"].shape[1]


class OneByOne:
    """A wrapper of TRL's collator that processes each example alone. The loader's workers run it."""

    def __init__(self, collator: NamingCollator, weights: ImageWeights) -> None:
        self.collator, self.weights = collator, weights

    def __call__(self, examples: Sequence[Example]) -> list[Processed]:
        """Process each example."""
        return [self._processed(example) for example in examples]

    def _processed(self, example: Example) -> Processed:
        batch = dict(self.collator([example]))
        lengths = batch["attention_mask"].sum(1).numpy()
        longest = getattr(self.collator.collator, "max_length", None)  # a user's own collator has none
        if longest is not None and lengths.max() >= longest:
            self._refuse_cut_image(example, batch, longest)
        is_trained = batch["labels"] != -100 if "labels" in batch else batch["completion_mask"] != 0
        trained = int(is_trained[:, 1:].sum())  # the first token is never predicted
        image = self._image_token
        image_tokens = 0 if image is None else int((batch["input_ids"] == image).sum())
        return Processed(example, batch, lengths, self.weights.count(batch), trained, image_tokens)

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

    `collate` is TRL's collator, with the processor. An example has several `rows`, each with the same images, for a
    pair: then the batch has the first rows of all examples, and after them all second rows.
    """

    def __init__(self, collate: Callable[[list[Example]], Any], pad_token_id: int, *, rows: int = 1) -> None:
        self.collate, self.pads, self.rows = collate, {**_PADS, "input_ids": pad_token_id}, rows
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
            found = Comparison("merged images", len(off := _differing(merged, own)), 0.0, ", ".join(off))
            self.is_equal[kind] = found.holds
            if not found.holds:
                logger.info("trl-packfa: %s, so they are processed twice.", found.why)
        return own

    def _merged(self, batches: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Join the batches of examples, padding values by token on the right; `None` if some do not fit together."""
        parts = [part for batch in batches if (part := _in_parts(batch, self.rows)) is not None]
        if len(parts) < len(batches):
            return None
        batches = [of_row for by_row in zip(*parts, strict=True) for of_row in by_row]
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


def _in_parts(batch: dict[str, Any], rows: int) -> list[dict[str, Any]] | None:
    """Split the batch of an example into one for each of its rows; `None` if a value has no part for each."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    if rows == 1:
        return [batch]
    if len(tensors) < len(batch) or any(len(value) % rows for value in tensors):
        return None
    # An example's rows have the same images: (4, ...) pixels of two rows are (2, ...) pixels of each.
    parts = zip(*(value.chunk(rows) for value in tensors), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def _differing(merged: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return the keys of two batches' values that differ; token ids at pads, which no model computes, may."""
    # TRL's collators of pairs fill rows with the pad token, and with 0 where they moved tokens to the left.
    true = own["attention_mask"].bool()

    def is_same(one: Any, other: Any, *, of_ids: bool) -> bool:
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(*((one[true], other[true]) if of_ids else (one, other)))

    keys = dict.fromkeys([*merged, *own])
    return [key for key in keys if not is_same(merged.get(key), own.get(key), of_ids=key == "input_ids")]


# Edge of a patch in pixels, and channels of an image, for a config that does not say them.
_EDGE, _CHANNELS = 14, 3


@dataclass(frozen=True)
class ImageWeights:
    """The weight of an image patch, its activations and operations as shares of a token's in the text decoder."""

    values: int  # numbers that a processor makes for a patch: its pixels, in all channels
    size: float  # activations, at most 1
    cost: float  # operations

    @classmethod
    def of(cls, model: Any) -> ImageWeights:
        """Read the weights from the shape of a model, as it will train. All are 0 without a vision tower."""
        decoder, head = text_decoder(model), model.get_output_embeddings()
        if decoder is None:
            return cls(1, 0.0, 0.0)
        inside = {module for module in decoder.modules() if isinstance(module, nn.Linear)}
        of_head = set() if head is None else set(head.modules())  # PEFT's wrapper holds two, if the head is trained
        others = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside and m not in of_head]
        trains = any(weight.requires_grad for module in others for weight in module.parameters())
        outputs, in_decoder = [m.out_features for m in others], sum(m.out_features for m in inside)
        # A tower that is not trained keeps the outputs of one layer at a time, and has no backward.
        kept = sum(outputs) if trains else max(outputs, default=0)
        passes = 1.0 if trains else 1 / 3
        return cls(
            values=_patch_values(inner_model(model).config),
            size=min(1.0, kept / max(in_decoder, 1)),
            cost=passes * _products(others) / max(_products(inside), 1),
        )

    def count(self, batch: dict[str, Any]) -> float:
        """Count the image patches of a batch, those that only fill it up included."""
        pixels = (value for key, value in batch.items() if key.startswith("pixel_values"))
        return sum(value.numel() for value in pixels if isinstance(value, torch.Tensor)) / self.values


def _products(modules: Any) -> int:
    return sum(module.in_features * module.out_features for module in modules)


def _patch_values(config: Any) -> int:
    vision = getattr(config, "vision_config", None)  # composites name their parts differently
    edge = getattr(vision, "patch_size", None) or _EDGE
    height, width = edge if isinstance(edge, (list, tuple)) else (edge, edge)
    channels = next(
        (n for name in ("num_channels", "in_channels", "in_chans") if (n := getattr(vision, name, None))), _CHANNELS
    )
    return height * width * channels * (getattr(vision, "temporal_patch_size", None) or 1)


class RankStep(NamedTuple):
    """The examples of one rank in a step, in numbers."""

    largest_padded: int  # size of its largest padded micro-batch, in tokens
    sizes: list[np.ndarray]  # of the examples that may share a micro-batch, patches counted as tokens
    cost: float  # arithmetic of all examples
    counts: np.ndarray  # examples, tokens, trained tokens and image tokens, `(4,)`

    def fewest(self, budget: int) -> int:
        """Return the fewest micro-batches that these examples fit into."""
        return sum(fewest_micro_batches(sizes, budget) for sizes in self.sizes)


class OwnStep(NamedTuple):
    """A step as this rank runs it."""

    examples: list[Processed]
    padded: np.ndarray  # the number of each example's padded micro-batch
    parts: list[list[int]]  # the examples of each micro-batch, none of idle ones
    imbalance: float

    @property
    def shortest(self) -> int:
        """The example that a micro-batch without one runs, untrained."""
        return int(np.argmin([example.tokens for example in self.examples]))

    def part(self, numbers: list[int], facts: Any) -> Part:
        """Return a micro-batch of these examples."""
        return Part([self.examples[i] for i in numbers or [self.shortest]], facts, is_idle=not numbers)


class OwnCutter(ReadCutter):
    """A cutter of steps with images, in which each rank cuts its own examples, of `rows` rows.

    The sizes of all ranks are gathered; images and their outputs stay on their rank. The size of a micro-batch is its
    tokens plus its image patches, weighted ([`ImageWeights`]). The budget is `max_tokens_per_microbatch`, or the size
    of the step's largest padded micro-batch, with its pads, whatever the batch size is.
    """

    def __init__(self, trainer: Any, *, rows: int = 1) -> None:
        self.accelerator, self.asked = trainer.accelerator, trainer.args.max_tokens_per_microbatch
        self.weights, self.quadratic = ImageWeights.of(trainer.model), quadratic_weight(trainer.model)
        self.rows, self.pad_token_id = rows, trainer._tokenizer.pad_token_id
        self.seen = np.zeros(4, dtype=np.int64)  # examples, tokens, trained and image tokens of all ranks so far
        self._collator: CountingCollator | None = None
        self.free_budget: int | None = self.asked  # that of the last step, once there is one

    @property
    def reports(self) -> dict[str, PackingReport]:
        """The report of the examples that have trained, by dataset name: their tokens exist only after collation."""
        return {"train": PackingReport.of_seen(*self.seen.tolist())}

    def loading(self, collate: Any) -> OneByOne:
        """Return the loader's collator, which processes each example alone; `collate` is TRL's in its wrapper."""
        return OneByOne(collate.collator, self.weights)

    def collated(self, part: Part, collate: Callable[[list[Example]], Any]) -> CountedBatch:
        """Collate a micro-batch of processed examples; `collate` is TRL's, with the processor."""
        self._collator = self._collator or CountingCollator(Merging(collate, self.pad_token_id, rows=self.rows))
        return super().collated(part._replace(is_idle=False), self._collator)  # each trainer has its own idle ones

    def cut_own(self, batches: Sequence[list[Processed]], *, by_size: bool = False) -> OwnStep:
        """Cut the processed examples of a step, given by padded micro-batch.

        With `by_size`, only examples of padded micro-batches with equally many may share a micro-batch.
        """
        examples = [example for batch in batches for example in batch]
        padded = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        tokens, patches, widths, trained, image_tokens = (
            np.array([getattr(example, name) for example in examples])
            for name in ("tokens", "patches", "width", "trained", "image_tokens")
        )
        # Rounded up, so that a padded micro-batch always fits the budget that is made of it.
        sizes = np.ceil(tokens + self.weights.size * patches).astype(np.int64)
        cost = document_cost(tokens, self.quadratic / self.rows) + self.weights.cost * patches
        pads = self.rows * np.array([widths[padded == group].max() for group in padded]) - tokens
        shared = np.bincount(padded)[padded] if by_size else np.zeros(len(examples), dtype=np.int64)
        together = [np.flatnonzero(shared == number) for number in np.unique(shared)]
        mine = RankStep(
            largest_padded=int(np.bincount(padded, weights=sizes + pads).max()),
            sizes=[sizes[members] for members in together],
            cost=float(cost.sum()),
            counts=np.array([len(examples), tokens.sum(), trained.sum(), image_tokens.sum()]),
        )
        ranks: list[RankStep] = [mine] if self.accelerator.num_processes == 1 else gather_object([mine])
        self.seen = self.seen + sum(rank.counts for rank in ranks)
        budget = self.asked or max(rank.largest_padded for rank in ranks)
        count = max(rank.fewest(budget) for rank in ranks)
        if self.asked is None and count > len(batches):  # best fit does not always find the fewest
            count, parts = len(batches), [np.flatnonzero(padded == group).tolist() for group in range(len(batches))]
        else:
            parts = []
            for members in together:
                # A rank with fewer than the others makes more of its last ones, if they are enough.
                spare = count - mine.fewest(budget) if members is together[-1] else 0
                wanted = min(fewest_micro_batches(sizes[members], budget) + spare, len(members))
                cut = recut(sizes[members], cost=cost[members], budget=budget, num_micro_batches=wanted)
                parts += [members[part].tolist() for part in cut]
        # The last micro-batch of a step reduces gradients over ranks. DDP leaves out a vision tower that no rank runs
        # then, so micro-batches with images come last.
        parts.sort(key=lambda part: (bool(patches[part].any()), -cost[part].sum()))
        self.free_budget = budget
        costs = np.array([rank.cost for rank in ranks])
        return OwnStep(examples, padded, [[]] * (count - len(parts)) + parts, float(costs.max() / costs.mean()))


def why_images_stay(model: nn.Module, neftune_noise_alpha: float | None) -> str:
    """Return why other micro-batches of images would train another loss; `""` if they train the same."""
    if neftune_noise_alpha is not None:
        return "NEFTune's noise depends on the padded row, and the model embeds padded rows"
    norm = next((name for name, m in model.named_modules() if isinstance(m, _BATCH_NORMS)), "")
    return f"'{norm}' is a batch norm, which depends on all images of a micro-batch" if norm else ""
