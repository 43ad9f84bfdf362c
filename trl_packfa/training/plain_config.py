"""Handling of TRL's plain configs, which do not ask for packing: pack if possible, else train padded as TRL does."""

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
    """Tell whether the user asked for packing, by the config's class or a field. Then padding is no fallback."""
    fields = ("packing", "eval_packing", "padding_free")
    return isinstance(args, PackedSFTConfig) or any(getattr(args, name, False) for name in fields)


def settle(
    args: TrainingArguments | None, output_dir: str, refuse: Callable[[PackedSFTConfig], None]
) -> tuple[PackedSFTConfig, PackingError | None]:
    """Return the config to train with, and the error that explains a fallback to padding, or `None`.

    The config packs by the first strategy that `refuse` accepts. If it accepts none, and the user did not ask for
    packing, the config trains padded.

    Raises:
        [`PackingError`]: from `refuse`, if the user asked for packing, or if TRL itself refuses the config.
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


def tell_padded(refusal: PackingError, trainer: str = "SFTTrainer") -> None:
    """Log, in one line, why a run is not packed but trained as TRL's `trainer` would."""
    what = refusal.what.removesuffix(".")
    why = f" ({'; '.join(refusal.why)})" if refusal.why else ""
    logger.warning("trl-packfa: %s%s. Training as %s would: padded, without a default adapter.", what, why, trainer)


def tell_adapter(asked: TrainingArguments | None, settled: TrainingArguments, adapter: Any) -> None:
    """Log, in one line, that a run trains an adapter by default, and which field turns it off.

    Args:
        asked (`TrainingArguments`, *optional*), settled (`TrainingArguments`):
            The config that the user passed, and the config of the run. Nothing is logged if the user passed one of
            ours, which has a `use_peft` field.
        adapter (`PeftConfig`, *optional*):
            The adapter that our config adds.
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
    """A model as the caller passed it, to build the trainer a second time after a refusal.

    Args:
        model (`str` or `torch.nn.Module`): the trainer's argument. A name is loaded again.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
        self.trained = [(parameter, parameter.requires_grad) for parameter in parameters]

    def restore(self, built: Any) -> Any:
        """Return the model without the adapter that `built` wraps around it, with its first `requires_grad` flags."""
        if isinstance(self.model, nn.Module) and isinstance(built, PeftModel) and built is not self.model:
            built.unload()
        for parameter, trained in self.trained:
            parameter.requires_grad_(trained)
        return self.model
