"""Helpers for a trainer that falls back to padding: the model as the caller gave it, and one line of log."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments

from ...errors import PackingError

logger = get_logger(__name__)


def tell_padded(refusal: PackingError, trainer: str = "SFTTrainer") -> None:
    """Log, in one line, why a run is not packed but trained as TRL's `trainer` would."""
    what = refusal.what.removesuffix(".")
    why = f" ({'; '.join(refusal.why)})" if refusal.why else ""
    logger.warning("trl-packfa: %s%s. Training as %s would: padded, without a default adapter.", what, why, trainer)


def tell_adapter(asked: TrainingArguments | None, settled: TrainingArguments, adapter: Any) -> None:
    """Log, in one line, that a run trains an adapter by default, and which field turns it off.

    `asked` is the config that the user passed, `settled` that of the run, `adapter` the one that our config adds.
    Nothing is logged if the user passed a config of ours, which has a `use_peft` field.
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
    """A model as the caller passed it, to build the trainer a second time after a refusal. A name is loaded again."""

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
