"""`trl-packfa train`: everything after the name is read by TRL's own parser, see `training/script.py`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..versions import require_versions

if TYPE_CHECKING:
    from ..training.script import Kind

# What `--trainer` may name besides SFT, and what our classes for it are called.
_NAMES = {"dpo": "PackedDPO", "reward": "PackedReward", "kto": "PackedKTO"}


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command; its flags are those of a trainer's config, too heavy to load for `--help`."""
    text = "packed fine-tune, DPO, KTO or reward model from a YAML file or flags (see: trl-packfa train --help)"
    commands.add_parser("train", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Train with these flags; `--trainer` says which of our trainers reads them."""
    require_versions()
    from ..training.script import train

    return train(argv, kind_of(argv))


def kind_of(argv: list[str]) -> Kind:
    """The trainer that flags or a YAML file name, and its config."""
    import trl_packfa

    from ..training.script import SFT, Kind, asked_trainer

    name = _NAMES.get(asked_trainer(argv))
    # TRL's other trainers take seconds to import: by name, so that only the one that is asked for is.
    return SFT if name is None else Kind(getattr(trl_packfa, f"{name}Trainer"), getattr(trl_packfa, f"{name}Config"))
