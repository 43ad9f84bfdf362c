"""Common base of the packed preference trainers' configs: the fields of `PackedSFTConfig` that apply to pairs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

from ...errors import InvalidConfig
from ...packing import MINIBATCH, STEP, Strategy
from ...versions import installed_version
from ..common.config import CommonConfig, require_recutting
from ..common.validation import refuse_liger

logger = logging.getLogger(__name__)

# Strategies by `packing_strategy`. Those that fill rows over the whole dataset are missing, because their steps would
# differ from the padded run's.
_STRATEGIES = {strategy.name: strategy for strategy in (STEP, MINIBATCH)}


@dataclass
class PreferenceConfig(CommonConfig):
    """Fields of a packed preference trainer's config, in addition to those of TRL's config and `ModelConfig`."""

    packing_strategy: str = field(
        default=STEP.name,
        metadata={
            "help": "`'step'`: each optimizer step has the pairs of the padded run. If the loss is a mean over pairs, "
            "they are re-cut into as few and as equal micro-batches as the token budget allows; a pair is never "
            "split. `'minibatch'`: each micro-batch has the pairs of the padded run's micro-batch.",
            "choices": list(_STRATEGIES),
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a micro-batch under `packing_strategy='step'`. Both answers of a pair count, "
            "with their prompts. Default: the size of the padded run's largest micro-batch."
        },
    )
    overflow: str = field(
        default="truncate",
        metadata={
            "help": "What happens to pairs with a row longer than `max_length`: `'truncate'`, `'drop'`, or `'error'`. "
            "`'truncate'` is TRL's: it cuts the end of the answer, and drops a pair whose prompt leaves no room for "
            "an answer. The report counts them.",
            "choices": ["truncate", "drop", "error"],
        },
    )

    def __post_init__(self) -> None:
        refuse_liger(self, type(self).__name__)
        super().__post_init__()
        self._settle_packing()

    def _settle_packing(self) -> None:
        args: Any = self
        choices = {f.name: f.metadata.get("choices") for f in fields(self)}
        for name in ("packing_strategy", "overflow"):
            if getattr(self, name) not in choices[name]:
                raise InvalidConfig(
                    f"{name}='{getattr(self, name)}' is not supported by {type(self).__name__}.",
                    why=["splitting an answer would invalidate its preference label"]
                    if self.overflow == "split"
                    else [],
                    do=f"Choose one of {choices[name]}.",
                )
        if getattr(args, "truncation_mode", "keep_start") != "keep_start" and args.max_length is not None:
            raise InvalidConfig(
                f"truncation_mode='{args.truncation_mode}' with packing: answers are cut at their end only.",
                why=["TRL has deprecated truncation_mode"],
                do="Drop it, or cut the data yourself.",
            )
        if getattr(args, "padding_free", False):
            trl = installed_version("trl")
            logger.warning(
                "trl-packfa: padding_free=True trains without padding here; TRL %s's own trainer would warn and pad.",
                trl,
            )
            args.padding_free = False  # otherwise TRL's trainer would warn that it ignores the field
        require_recutting(self)

    @property
    def strategy(self) -> Strategy:
        """The strategy that `packing_strategy` names."""
        return _STRATEGIES[self.packing_strategy]

    @classmethod
    def from_args(cls, args: TrainingArguments, **changes: Any) -> Any:
        """Convert TRL's or transformers' arguments to a config of this class; return one of this class unchanged."""
        return args if isinstance(args, cls) else cls(**{**cls.fields_of(args), **changes})
