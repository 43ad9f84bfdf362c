"""What commands print: a table for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from ..terminal.tables import print_table


def add_json(command: argparse.ArgumentParser) -> None:
    """The `--json` switch, the same for every command that has one."""
    command.add_argument("--json", action="store_true", help="machine-readable output")


def print_rows(rows: Sequence[Mapping[str, object]], *, as_json: bool) -> int:
    """Print rows that share their keys; returns the exit code of a command that is done."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print_table(rows)
    return 0


def described(versions: Mapping[str, object]) -> str:
    """Packages and their versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
