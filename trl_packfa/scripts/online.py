"""GRPO and RLOO for the command line: TRL's trainers, with configs like the packed trainers' and without padding."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl import rewards as trl_rewards

from ..config.common import CommonConfig
from ..config.requirements import require
from ..errors import InvalidConfig
from ..trainers.loading import loading_as_configured
from ..trainers.padding_free.padding_free import padding_free
from ..trainers.requirements.runs import SETUP
from ..trainers.requirements.training import Training


@dataclass
class PaddingFreeGRPOConfig(CommonConfig, GRPOConfig):
    """All fields of TRL's `GRPOConfig` and `ModelConfig`, with LoRA on."""


@dataclass
class PaddingFreeRLOOConfig(CommonConfig, RLOOConfig):
    """All fields of TRL's `RLOOConfig` and `ModelConfig`, with LoRA on."""


def _without_pads(trainer: Any, model: str, *, args: Any, **given: Any) -> Any:
    run = Training(args, trainer.__name__, model=model, given=given, formats=(("prompt",),))
    require(SETUP, run)
    with loading_as_configured(model, args, given, user_args=args):
        built = trainer(model, args=args, **given)
    return padding_free(built, check_first_batch=args.check_packing, **args.patch_options)


# TRL's trainers without padding. They take TRL's own arguments.
grpo, rloo = partial(_without_pads, GRPOTrainer), partial(_without_pads, RLOOTrainer)


def reward_options(script_args: Any) -> dict[str, Any]:
    """Return the trainer's `reward_funcs`: the functions and the reward model that TRL's script arguments name."""
    rewards: list[Any] = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    rewards += [_reward(name) for name in script_args.reward_funcs or ()]
    if not rewards:
        raise InvalidConfig(
            "no reward is named.",
            do="Pass --reward_funcs MODULE.FUNCTION (my_rewards.brevity is the function `brevity` in my_rewards.py in "
            "this folder), or --reward_model_name_or_path.",
        )
    return {"reward_funcs": rewards}


# The reward functions that TRL's scripts accept by name. Those in `_MADE` are called with these arguments to make the
# function.
_MADE = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
_BY_NAME = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", *_MADE)


def _reward(name: str) -> Callable[..., Any]:
    """Import a reward function: TRL's by its name, or any by its dotted path, also from the current folder."""
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
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(
            f"reward_funcs: cannot import '{name}'.",
            why=[str(error)],
            do="Name a function of a module that is installed, or of a file in the current folder.",
        ) from error
