"""Training on images: TRL's own micro-batches, and the model computes them without their pads.

A processor makes the tokens of an image while it collates. So rows cannot be filled before, and the text decoder
removes the pads after images and text are merged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import TrainingArguments

from ...errors import InvalidConfig
from ..common.validation import image_columns
from ..padding_free.padding_free import run_without_pads
from .config import PackedSFTConfig

logger = get_logger(__name__)


def image_column(datasets: Iterable[tuple[str, Dataset | IterableDataset]]) -> str | None:
    """Return the column with images of the first dataset that has one, `None` if none has."""
    # TRL refuses other types in its own words, once the arguments are settled.
    found = (image_columns(dataset) for _, dataset in datasets if isinstance(dataset, (Dataset, IterableDataset)))
    return next((columns[0] for columns in found if columns), None)


def without_packing(args: TrainingArguments | None, output_dir: str, column: str) -> PackedSFTConfig | None:
    """Return the config of a run on images that computes no pads; `None` if the user asked for TRL's padded run.

    Raises:
        [`InvalidConfig`]: if the user asked for a strategy that fills rows.
    """
    if args is None:
        return PackedSFTConfig(output_dir, packing=False)
    packed = args if isinstance(args, PackedSFTConfig) else None
    if packed is not None and not packed.packing:
        return None
    strategy = packed.strategy if packed is not None else None
    if packed is not None and packed.sequence_parallel > 1:
        raise InvalidConfig(
            f"sequence_parallel={packed.sequence_parallel}, but the dataset has images in its column '{column}'.",
            why=["such batches run padded rows without their pads, and only packed rows can be shared"],
            do="Drop sequence_parallel, or the column to train on the text alone.",
        )
    if (strategy is not None and strategy.fills_rows) or (packed is None and getattr(args, "packing", False)):
        raise InvalidConfig(
            f"rows cannot be filled before training: the dataset has images in its column '{column}'.",
            why=["a processor makes their tokens during collation, so the length of an example is not known before"],
            do="Use packing_strategy='minibatch', which computes TRL's micro-batches without their pads.",
        )
    if strategy is not None and strategy.recuts_steps:
        logger.info("trl-packfa: with images, micro-batches are TRL's own: packing_strategy='step' re-cuts text only.")
    settled = copy.copy(PackedSFTConfig.from_args(args, packing_strategy=None))  # the user's own stays as it is
    settled.packing, settled.packing_strategy, settled.eval_packing = False, None, None
    settled.padding_free = False  # TRL's own, which it refuses with images; the model computes no pads anyway
    return settled


def run_images_without_pads(trainer: Any) -> None:
    """Make a trainer that was built without packing compute no pads, see [`padding_free`].

    Raises:
        [`UnsupportedModel`], [`ContaminationError`]: if its model is not exact without pads.
    """
    args: PackedSFTConfig = trainer.args
    run_without_pads(trainer, check_first_batch=args.check_packing, **args.patch_options)
