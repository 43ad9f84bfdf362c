"""`trl-packfa bench`: TRL's own parser reads everything after the name, see `bench/command.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "packed and padded training side by side (see: trl-packfa bench --help)"
    commands.add_parser("bench", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Run the benchmark with these flags and return its exit code."""
    require_versions()
    from ..bench.command import bench

    return bench(argv)
