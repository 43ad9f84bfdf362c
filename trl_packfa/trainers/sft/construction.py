"""Settle the arguments of SFT: which config is tried, and which strategy a run on images has."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments

from ...config.sft import PackedSFTConfig
from ...errors import PackingError
from ..loading import output_dir
from ..requirements.training import Training
from ..settling import settle


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
    make = partial(_config, args, output_dir(model))
    # A config of TRL's names no strategy. `step` first, because it matches padded training. Where it is not possible
    # (for example a stream of documents without a length limit), each micro-batch becomes a row.
    is_asked = _asks_for_packing(args)
    packed = [make] if is_asked else [partial(make, packing_strategy=name) for name in ("step", "minibatch")]
    padded = None if is_asked else partial(make, packing=False, use_peft=False)  # what TRL would train
    run = Training(args, "PackedSFTTrainer", model=model, given=given, user_args=args)
    run, refusal = settle(run, packed, padded=padded)
    if not run.is_on_images:
        return run.args, refusal, None
    settled = copy.copy(run.args)  # the user's own config stays as it is
    settled.packing, settled.packing_strategy, settled.eval_packing = False, None, None
    return settled, None, run.plan.name


def _asks_for_packing(args: TrainingArguments | None) -> bool:
    """Tell whether the user asked for packing, by the config's class or a field. Then padding is no fallback."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def _config(args: TrainingArguments | None, output_dir: str, **options: Any) -> PackedSFTConfig:
    """Return the user's config, or one with the arguments of TRL's and these options."""
    return PackedSFTConfig(output_dir, **options) if args is None else PackedSFTConfig.from_args(args, **options)
