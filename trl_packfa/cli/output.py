"""Output of the commands: a table for people or JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ..terminal import print_table

Commands: TypeAlias = "argparse._SubParsersAction"  # what `add_subparsers` returns


def add_json(command: argparse.ArgumentParser) -> None:
    """Declare the `--json` flag on a command."""
    command.add_argument("--json", action="store_true", help="machine-readable output")


def print_rows(rows: Sequence[Mapping[str, object]], *, as_json: bool) -> int:
    """Print rows that have the same keys; return exit code 0."""
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)
    return 0


def described(versions: Mapping[str, object]) -> str:
    """Return packages and their versions as one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
