"""`trl-packfa plan`: TRL's own parser reads everything after the name, see `plan/run.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "predict the effect of packing on a dataset, before you rent a GPU (see: trl-packfa plan --help)"
    commands.add_parser("plan", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Plan with these flags and return the exit code."""
    require_versions()
    from ..plan.run import plan

    return plan(argv)
