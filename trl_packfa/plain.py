"""A config that asks for no packing, TRL's own: packed where that is exact, trained as TRL trains it where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments

from .config import PackedSFTConfig
from .errors import PackingError

logger = get_logger(__name__)


def asks_for_packing(args: TrainingArguments | None) -> bool:
    """Whether rows of several documents were asked for, by a class or a field, so that padding would be no answer."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def settle(
    args: TrainingArguments | None, output_dir: str, refuse: Callable[[PackedSFTConfig], None]
) -> tuple[PackedSFTConfig, PackingError | None]:
    """What to train with: packed, or padded where no packing was asked for and `refuse` raises; and what it raised.

    Raises:
        [`PackingError`]: `refuse`'s, where packing was asked for.
    """
    try:
        settled = PackedSFTConfig.from_args(args) if args is not None else PackedSFTConfig(output_dir)
        refuse(settled)
    except PackingError as refusal:
        if asks_for_packing(args):
            raise
        return padded(args, output_dir), refusal
    return settled, None


def padded(args: TrainingArguments | None, output_dir: str) -> PackedSFTConfig:
    """What TRL would train with for a config that asks for no packing."""
    if args is None:
        return PackedSFTConfig(output_dir, packing=False, use_peft=False)
    return PackedSFTConfig.from_args(args, packs=False)


def tell_padded(refusal: PackingError) -> None:
    """One line that says why a run is not packed."""
    why = "; ".join([refusal.what.removesuffix("."), *refusal.why])
    logger.warning(
        "trl-packfa: not packed: %s. Trained as SFTTrainer would, padded, with the adapter that it is given.", why
    )


class AsGiven:
    """A model as the caller handed it over, for a second construction after a refusal.

    Args:
        model (`str` or `torch.nn.Module`): what the trainer is given; a name is loaded again.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
        self.trained = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self, built: Any) -> Any:
        """The model without the adapter that `built` has around it, its parameters trained as they were."""
        if isinstance(self.model, nn.Module) and isinstance(built, PeftModel) and built is not self.model:
            built.unload()
        for parameter, trained in self.trained:
            parameter.requires_grad_(trained)
        return self.model
