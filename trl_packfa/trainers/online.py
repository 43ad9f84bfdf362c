"""GRPO and RLOO for the command line: TRL's trainers on the configs of the packed ones, their models run without pads.

Generation, rewards, losses, steps and checkpoints are TRL's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, RLOOConfig, RLOOTrainer
from trl import rewards as trl_rewards

from ..errors import InvalidConfig, InvalidDataset
from ..training.common_config import CommonConfig, require_trainable, settle_loading, settle_precision
from ..training.construction import load_as_asked
from ..training.model_loading import named, telling_of_targets
from .padding_free import padding_free
from .refusals import refuse_before_loading, refuse_liger, require_columns, require_run


@dataclass
class OnlineConfig(CommonConfig):
    """Stands before TRL's config among the bases of one: how the model is loaded, adapted and run."""

    def __post_init__(self) -> None:
        # By name, as PackedSFTConfig does: neither calls the other's.
        ModelConfig.__post_init__(self)
        settle_precision(self)
        refuse_liger(self, type(self).__name__)
        trl_config: Any = GRPOConfig if isinstance(self, GRPOConfig) else RLOOConfig
        trl_config.__post_init__(self)
        settle_loading(self)
        require_trainable(self)


@dataclass
class PaddingFreeGRPOConfig(OnlineConfig, GRPOConfig):
    """All fields of TRL's `GRPOConfig` and `ModelConfig`, with LoRA on."""


@dataclass
class PaddingFreeRLOOConfig(OnlineConfig, RLOOConfig):
    """All fields of TRL's `RLOOConfig` and `ModelConfig`, with LoRA on."""


def grpo(model: str, **given: Any) -> Any:
    """TRL's `GRPOTrainer` for these arguments of it, without pads."""
    return _without_pads(GRPOTrainer, model, **given)


def rloo(model: str, **given: Any) -> Any:
    """TRL's `RLOOTrainer` for these arguments of it, without pads."""
    return _without_pads(RLOOTrainer, model, **given)


def _without_pads(trainer: Any, model: str, *, args: Any, **given: Any) -> Any:
    for name, dataset in named(given.get("train_dataset"), given.get("eval_dataset")):
        if not isinstance(dataset, Dataset):
            raise InvalidDataset(
                f"the {name} dataset is a stream, of which TRL's {trainer.__name__} cannot train.",
                do="Drop dataset_streaming.",
            )
        require_columns(dataset, name=name, trainer=trainer.__name__, formats=(("prompt",),))
    refuse_before_loading(trainer.__name__, {"model": model, **given}, args)
    require_run({"model": model, **given}, args)
    quantization, adapter = load_as_asked(model, args, quantization=None, adapter=None)
    with telling_of_targets(model, args):
        built = trainer(model, args=args, quantization_config=quantization, peft_config=adapter, **given)
    return padding_free(built, check_first_batch=args.check_packing, **args.patch_options)


def reward_options(script_args: Any) -> dict[str, Any]:
    """What TRL's trainers take of the script's arguments: reward functions, and a reward model.

    Args:
        script_args (`GRPOScriptArguments` or `RLOOScriptArguments`):
            Of TRL's own scripts.

    Raises:
        [`InvalidConfig`]: if there is none, or one cannot be imported.
    """
    rewards: list[Any] = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    rewards += [_reward(name) for name in script_args.reward_funcs or ()]
    if not rewards:
        raise InvalidConfig(
            "there is no reward.",
            do="Pass --reward_funcs MODULE.FUNCTION (my_rewards.brevity is `brevity` in my_rewards.py, here), or "
            "--reward_model_name_or_path.",
        )
    return {"reward_funcs": rewards}


# As TRL's scripts know them by name; this one makes the function.
_MADE = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
_BY_NAME = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", *_MADE)


def _reward(name: str) -> Callable[..., Any]:
    """A reward function of TRL's by its name, or any by its dotted path, from the current folder too."""
    if name in _BY_NAME:
        found = getattr(trl_rewards, name)
        return found(**_MADE[name]) if name in _MADE else found
    module, _, function = name.rpartition(".")
    if not module:
        raise InvalidConfig(
            f"reward_funcs: there is no reward function '{name}'.",
            do=f"Write MODULE.FUNCTION, or one of TRL's: {', '.join(_BY_NAME)}.",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(
            f"reward_funcs: cannot import '{name}'.",
            why=[str(error)],
            do="Name a function of a module that is installed, or of a file in the current folder.",
        ) from error
    return found
