"""`trl-packfa train`: everything after the name is read by TRL's own parser, see `training/script.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command; its flags are those of `PackedSFTConfig`, too heavy to load for `--help`."""
    text = "packed fine-tune from a YAML file or flags (see: trl-packfa train --help)"
    commands.add_parser("train", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Train with these flags."""
    require_versions()
    from ..training.script import train

    return train(argv)
