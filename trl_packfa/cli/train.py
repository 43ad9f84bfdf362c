"""The commands that take training arguments. Each takes its flags and returns its exit code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..scripts.train import Kind

# The packed trainers that `--trainer` may name besides SFT.
_PACKED = {"dpo": "PackedDPO", "reward": "PackedReward", "kto": "PackedKTO"}
# TRL's own trainers, run padding-free.
_ONLINE = {"grpo": "GRPO", "rloo": "RLOO"}


def train(argv: list[str]) -> int:
    """Train; `--trainer` selects the trainer."""
    from ..scripts.train import train

    return train(argv, kind_of(argv))


def plan(argv: list[str]) -> int:
    """Plan a run."""
    from ..plan.run import plan

    return plan(argv)


def prepare(argv: list[str]) -> int:
    """Prepare the data of a run."""
    from ..scripts.prepare import prepare

    return prepare(argv)


def bench(argv: list[str]) -> int:
    """Measure packed and padded training."""
    from ..bench.run import bench

    return bench(argv)


def kind_of(argv: list[str]) -> Kind:
    """Return the trainer that the flags or the YAML file select, with its config class."""
    from ..scripts.parsing import trainer_name
    from ..scripts.train import SFT, Kind

    # TRL's other trainers take seconds to import, so only the selected one is imported.
    asked = trainer_name(argv)
    if asked in _PACKED:
        import trl_packfa

        name = _PACKED[asked]
        return Kind(getattr(trl_packfa, f"{name}Trainer"), getattr(trl_packfa, f"{name}Config"))
    if asked in _ONLINE:
        from ..scripts import online

        script = importlib.import_module(f"trl.scripts.{asked}")
        return Kind(
            getattr(online, asked),
            getattr(online, f"PaddingFree{_ONLINE[asked]}Config"),
            script=getattr(script, f"{_ONLINE[asked]}ScriptArguments"),
            options=online.reward_options,
            writes_whole=False,
        )
    return SFT
