"""A config that asks for no packing, TRL's own: packed where it can be, trained as TRL trains it where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments
from trl import SFTConfig

from ..errors import InvalidConfig, PackingError
from .config import PackedSFTConfig

logger = get_logger(__name__)


def asks_for_packing(args: TrainingArguments | None) -> bool:
    """Whether rows of several documents were asked for, by a class or a field, so that padding would be no answer."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def settle(
    args: TrainingArguments | None, output_dir: str, refuse: Callable[[PackedSFTConfig], None]
) -> tuple[PackedSFTConfig, PackingError | None]:
    """What to train with: packed by the first strategy that `refuse` lets pass, or padded where no packing was asked
    for and none passes; and what it raised then.

    Raises:
        [`PackingError`]: `refuse`'s, where packing was asked for; where TRL's own trainer refuses its config.
    """
    if asks_for_packing(args):
        _refuse_unenforced_length(args)
        settled = PackedSFTConfig.from_args(args)  # type: ignore[arg-type]  # None asks for nothing
        refuse(settled)
        return settled, None
    refusal: PackingError | None = None
    # `step` first: the same training as padded. Where it cannot be (a stream whose documents nothing bounds, say),
    # each micro-batch as a row.
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
    """Refuse TRL's own config where TRL does: `padding_free=True` flattens documents of any length there."""
    if not isinstance(args, SFTConfig) or isinstance(args, PackedSFTConfig):
        return
    if args.padding_free and not args.packing and args.max_length is not None:
        raise InvalidConfig(
            f"padding_free=True without packing, and max_length={args.max_length}.",
            why=["TRL does not enforce max_length there, and refuses it"],
            do="Pass packing=True, max_length=None, or a PackedSFTConfig, which cuts documents and counts it.",
        )


def padded(args: TrainingArguments | None, output_dir: str) -> PackedSFTConfig:
    """What TRL would train with for a config that asks for no packing."""
    return _plain(args, output_dir, packing=False, use_peft=False)


def _plain(args: TrainingArguments | None, output_dir: str, **changes: Any) -> PackedSFTConfig:
    return PackedSFTConfig(output_dir, **changes) if args is None else PackedSFTConfig.from_args(args, **changes)


def tell_padded(refusal: PackingError, trainer: str = "SFTTrainer") -> None:
    """Log, in one line, why a run is not packed, but trained as TRL's `trainer` would."""
    what = refusal.what.removesuffix(".")
    why = f" ({'; '.join(refusal.why)})" if refusal.why else ""
    logger.warning("trl-packfa: %s%s. Training as %s would: padded, no adapter but a given one.", what, why, trainer)


def tell_adapter(asked: TrainingArguments | None, settled: TrainingArguments, adapter: Any) -> None:
    """Log, in one line, that a run trains an adapter which nobody has asked for, and which field turns that off.

    Args:
        asked (`TrainingArguments`, *optional*), settled (`TrainingArguments`):
            What the trainer was given, and what it trains with: one of ours says `use_peft` itself.
        adapter (`PeftConfig`, *optional*):
            That our config has asked for.
    """
    if adapter is None or isinstance(asked, type(settled)):
        return
    given = "no config" if asked is None else f"a plain {type(asked).__name__}"
    logger.warning(
        "trl-packfa: with %s, %s adds a LoRA adapter (r=%s) and trains that alone. %s(use_peft=False) trains all "
        "parameters.",
        given, type(settled).__name__.replace("Config", "Trainer"), getattr(adapter, "r", "?"), type(settled).__name__,
    )  # fmt: skip


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
