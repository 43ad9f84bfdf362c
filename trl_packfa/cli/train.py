"""`trl-packfa train`: everything after the name is read by TRL's own parser, see `training/script.py`."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from ..versions import require_versions

if TYPE_CHECKING:
    from ..training.script import Kind

# The packed trainers that `--trainer` may name besides SFT.
_PACKED = {"dpo": "PackedDPO", "reward": "PackedReward", "kto": "PackedKTO"}
# TRL's own, which run without pads.
_ONLINE = {"grpo": "GRPO", "rloo": "RLOO"}


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command; its flags are those of a trainer's config, too heavy to load for `--help`."""
    text = "packed fine-tune, DPO, KTO, reward model, GRPO or RLOO from YAML or flags (see: trl-packfa train --help)"
    commands.add_parser("train", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Train with these flags; `--trainer` says which of our trainers reads them."""
    require_versions()
    from ..training.script import train

    return train(argv, kind_of(argv))


def kind_of(argv: list[str]) -> Kind:
    """The trainer that flags or a YAML file name, and its config."""
    from ..training.parsing import asked_trainer
    from ..training.script import SFT, Kind

    # TRL's other trainers take seconds to import: by name, so that only the one that is asked for is.
    asked = asked_trainer(argv)
    if asked in _PACKED:
        import trl_packfa

        name = _PACKED[asked]
        return Kind(getattr(trl_packfa, f"{name}Trainer"), getattr(trl_packfa, f"{name}Config"))
    if asked in _ONLINE:
        from ..trainers import online

        script = importlib.import_module(f"trl.scripts.{asked}")
        return Kind(
            getattr(online, asked),
            getattr(online, f"PaddingFree{_ONLINE[asked]}Config"),
            script=getattr(script, f"{_ONLINE[asked]}ScriptArguments"),
            options=online.reward_options,
            writes_whole=False,
        )
    return SFT
