"""Examples with images, processed one by one, and batches made of them.

The loader's workers process each example alone, so its tokens and image patches are known before a step is cut. A
micro-batch is the processor's own batch: where joining the examples' batches would not give that, the processor makes
it.

Shape letters: B rows, L row length, R rows of an example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import nn

from ...patching.inspect import inner_model, text_decoder
from .image_rows import Example, NamingCollator, rejected
from .step_cutting import Documents

logger = get_logger(__name__)

# Values at pads, by the key of a batch; 0 for all others.
_PADS = {"labels": -100}


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

    def __call__(self, examples: Sequence[Example]) -> Documents:
        """Process each example."""
        return Documents([self._processed(example) for example in examples])

    def _processed(self, example: Example) -> Any:
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
            self.is_equal[kind] = _equal(merged, own)
            if not self.is_equal[kind]:
                logger.info("trl-packfa: the processor's batches depend on their examples: they are processed twice.")
        return own

    def _merged(self, batches: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Join the batches of examples: values by token are padded on the right, others follow each other.

        The result is `None` if some do not fit together.
        """
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


def _equal(merged: dict[str, Any], own: dict[str, Any]) -> bool:
    """Tell whether two batches are equal; token ids at pads, which no model computes, may differ."""
    if merged.keys() != own.keys() or not all(isinstance(value, torch.Tensor) for value in own.values()):
        return False
    # TRL's collators of pairs fill rows with the pad token, and with 0 where they moved tokens to the left.
    true = own["attention_mask"].bool()
    return all(
        value.dtype == own[key].dtype
        and value.shape == own[key].shape
        and torch.equal(*((value[true], own[key][true]) if key == "input_ids" else (value, own[key])))
        for key, value in merged.items()
    )


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
        others = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside and m is not head]
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
