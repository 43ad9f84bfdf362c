"""Tables in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows, of which there is at least one and which share their keys."""
    from rich.console import Console  # `--help` does without
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    # In a pipe there is no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
