"""`trl-packfa plan`: everything after the name is read by TRL's own parser, see `plan/run.py`."""

from __future__ import annotations

import argparse

from ..versions import require_versions


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "what packing will do to a dataset, before any GPU is rented (see: trl-packfa plan --help)"
    commands.add_parser("plan", help=text, add_help=False)


def run(argv: list[str]) -> int:
    """Plan with these flags."""
    require_versions()
    from ..plan.run import plan

    return plan(argv)
