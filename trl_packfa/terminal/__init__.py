"""Output of a run on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows that all have the same keys, `None` as "-"; print nothing for no rows."""
    if not rows:
        return
    from rich.console import Console  # lazy: `--help` does not need it
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    # A pipe has no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
