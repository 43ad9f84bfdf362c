"""Settle a trainer's arguments: packed if possible, else padded if the user did not ask for packing."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments

from ...config.requirements import require
from ...config.sft import PackedSFTConfig
from ...errors import PackingError
from ..base.model_loading import output_dir
from ..padding_free.padding_free import require_patchable
from ..requirements.data import DATA, FORMATS, TEXTS
from ..requirements.runs import PACKAGES, PACKED, TRAINABLE
from ..requirements.training import Training
from .images import without_packing


def settle_arguments(
    model: str | PreTrainedModel | PeftModel, args: TrainingArguments | None, given: dict[str, Any]
) -> tuple[PackedSFTConfig, PackingError | None, str | None]:
    """Settle the config to train with, before weights are read.

    `given` are the trainer's other arguments, by name. Returns the config; the error that explains why the run is
    padded, if the user did not ask for that; and the strategy of a run on images, which computes padded micro-batches
    without their pads (`None` for other runs).

    Raises:
        [`PackingError`]: if the user asked for packing and it is not possible, or if the run cannot be trained at all.
    """
    asked = Training(args, "PackedSFTTrainer", model=model, given=given, asked=args)
    require((*TRAINABLE, *DATA), asked)
    is_asked, images = _asks_for_packing(args), asked.images[1]
    if isinstance(args, PackedSFTConfig) and not args.packing:
        require((*FORMATS, *PACKAGES, *TEXTS), asked)
        return args, None, None
    # A config of TRL's names no strategy. `step` first, because it matches padded training. Where it is not possible
    # (for example a stream of documents without a length limit), each micro-batch becomes a row.
    refusal = on_images = settled = None
    for strategy in (None,) if is_asked else ("step", "minibatch"):
        try:
            settled = _packed(args, model, strategy)
            if images:
                settled, on_images = without_packing(asked.with_args(settled))
            else:
                require(PACKED, asked.with_args(settled))
            if not is_asked:
                require_patchable(asked.with_args(settled), unpad=bool(images))
            refusal = None
            break
        except PackingError as error:
            if is_asked:
                raise
            refusal = refusal or error
    if refusal is not None or settled is None:
        settled, on_images = _padded(args, output_dir(model)), None
    require((*FORMATS, *PACKAGES, *TEXTS), asked.with_args(settled))
    return settled, refusal, on_images


def _asks_for_packing(args: TrainingArguments | None) -> bool:
    """Tell whether the user asked for packing, by the config's class or a field. Then padding is no fallback."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def _padded(args: TrainingArguments | None, output_dir: str) -> PackedSFTConfig:
    """Return the config of the padded run that TRL would train for these arguments."""
    options: Any = {"packing": False, "use_peft": False}
    return PackedSFTConfig(output_dir, **options) if args is None else PackedSFTConfig.from_args(args, **options)


def _packed(args: TrainingArguments | None, model: Any, strategy: str | None = None) -> PackedSFTConfig:
    """Return the config of the packed run; `strategy` is that of a config which names none."""
    options: Any = {} if strategy is None else {"packing_strategy": strategy}
    if args is None:
        return PackedSFTConfig(output_dir(model), **options)
    return PackedSFTConfig.from_args(args, **options)
