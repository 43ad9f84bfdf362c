"""Output of a run on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Defaults of tqdm in a pipe: no bar for work of less than five seconds, then one line every half minute.
BARS_AS_LINES = {
    "TQDM_DELAY": "5",
    "TQDM_MININTERVAL": "30",
    "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}, {remaining} to go\n",
}


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
