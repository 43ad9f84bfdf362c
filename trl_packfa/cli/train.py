"""`trl-packfa train`: everything after the name is read by TRL's own parser, see `training/script.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command; its flags are those of a trainer's config, too heavy to load for `--help`."""
    text = "packed fine-tune from a YAML file or flags (see: trl-packfa train --help)"
    commands.add_parser("train", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Train with these flags; `--trainer` says which of our trainers reads them."""
    require_versions()
    import trl_packfa

    from ..training.script import SFT, SFT_NAME, Kind, asked_trainer, train

    asked = asked_trainer(argv)
    if asked == SFT_NAME:
        return train(argv, SFT)
    # TRL's other trainers take seconds to import: by name, so that only the one that is asked for is.
    name = {"dpo": "PackedDPO", "reward": "PackedReward", "kto": "PackedKTO"}[asked]
    return train(argv, Kind(getattr(trl_packfa, f"{name}Trainer"), getattr(trl_packfa, f"{name}Config")))
