"""`trl-packfa bench`: everything after the name is read by TRL's own parser, see `bench/command.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "packed and padded training side by side (see: trl-packfa bench --help)"
    commands.add_parser("bench", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Measure with these flags."""
    require_versions()
    from ..bench.command import bench

    return bench(argv)
