"""Settle a trainer's arguments, and refuse invalid ones, before any data or weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments
from trl import SFTConfig

from ...errors import InvalidConfig, PackingError
from ..common.model_loading import model_type, named, output_dir
from ..common.preflight import require_attention, require_reporters, require_tokenizer
from ..common.step_cutting import longest_of_stream
from ..common.validation import refuse_data, refuse_model, refuse_untrainable
from .config import PackedSFTConfig
from .images import image_column, without_packing
from .raw_dataset import prepares
from .validation import refuse_arguments, refuse_collator


def settle_arguments(
    model: str | PreTrainedModel | PeftModel, args: TrainingArguments | None, given: dict[str, Any]
) -> tuple[PackedSFTConfig, PackingError | None, str | None]:
    """Settle the config to train with: packed if possible, else padded if the user did not ask for packing.

    `given` are the trainer's other arguments, by name.

    Returns:
        The config; the error that explains why the run is padded, if it is and the user did not ask for that; and the
        strategy of a run on images, which computes padded micro-batches without their pads (`None` for other runs).

    Raises:
        [`PackingError`]: if the user asked for packing and it is not possible, or if the run cannot be trained at all.
    """

    def refuse(packed: PackedSFTConfig) -> None:
        if not packed.packing:
            return
        refuse_arguments(
            packed,
            compute_metrics=given["compute_metrics"],
            peft_config=given["peft_config"],
            compute_loss_func=given["compute_loss_func"],
        )
        for name, dataset in datasets:
            refuse_data(dataset, name=name)
        if packed.strategy.recuts_steps and isinstance(given["train_dataset"], IterableDataset):
            # Called only for its refusal, before weights are loaded. `StepCutter` calls it again.
            longest_of_stream(packed)
        refuse_model(model_type(model, packed) if isinstance(model, str) else model, packed)
        refuse_collator(given["data_collator"])

    datasets = named(given["train_dataset"], given["eval_dataset"])
    refuse_untrainable(model, given["peft_config"])
    column = image_column(datasets)
    found = None if column is None else without_packing(args, output_dir(model), column)
    settled, on_images = found if found is not None else (None, None)
    settled, refusal = (settled, None) if settled is not None else _settle(args, output_dir(model), refuse)
    require_reporters(settled)
    require_attention(settled)
    require_tokenizer(
        model, settled, processing_class=given["processing_class"], datasets=datasets,
        makes_text=given["formatting_func"] is None and prepares(settled),
    )  # fmt: skip
    return settled, refusal, on_images


def asks_for_packing(args: TrainingArguments | None) -> bool:
    """Tell whether the user asked for packing, by the config's class or a field. Then padding is no fallback."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def _settle(
    args: TrainingArguments | None, output_dir: str, refuse: Callable[[PackedSFTConfig], None]
) -> tuple[PackedSFTConfig, PackingError | None]:
    """Return the config to train with, and the error that explains a fallback to padding, or `None`.

    The config packs by the first strategy that `refuse` accepts. If it accepts none, and the user did not ask for
    packing, the config trains padded.
    """
    if asks_for_packing(args):
        _refuse_unenforced_length(args)
        settled = PackedSFTConfig.from_args(args)  # type: ignore[arg-type]  # it is not None here
        refuse(settled)
        return settled, None
    refusal: PackingError | None = None
    # `step` first, because it matches padded training. Where it is not possible (for example a stream of documents
    # without a length limit), each micro-batch becomes a row.
    for strategy in ("step", "minibatch"):
        try:
            settled = _plain(args, output_dir, packing_strategy=strategy)
            refuse(settled)
        except PackingError as error:
            refusal = refusal or error
        else:
            return settled, None
    return padded(args, output_dir), refusal


def _refuse_unenforced_length(args: TrainingArguments | None) -> None:
    """Refuse a plain `SFTConfig` that TRL refuses too: `padding_free=True` without packing, but with `max_length`."""
    if not isinstance(args, SFTConfig) or isinstance(args, PackedSFTConfig):
        return
    if args.padding_free and not args.packing and args.max_length is not None:
        raise InvalidConfig(
            f"padding_free=True without packing, and max_length={args.max_length}.",
            why=["TRL does not enforce max_length then, and refuses this combination"],
            do="Pass packing=True, max_length=None, or a PackedSFTConfig, which cuts documents and counts it.",
        )


def padded(args: TrainingArguments | None, output_dir: str) -> PackedSFTConfig:
    """Return the config of the padded run that TRL would train for these arguments."""
    return _plain(args, output_dir, packing=False, use_peft=False)


def _plain(args: TrainingArguments | None, output_dir: str, **changes: Any) -> PackedSFTConfig:
    return PackedSFTConfig(output_dir, **changes) if args is None else PackedSFTConfig.from_args(args, **changes)
