"""`trl-packfa bench`: strategies by default; `attention`, `pack` and `check` measure one part each."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def bench(argv: list[str]) -> int:
    """Run it; returns the exit code: 0 done, 1 if a side failed."""
    if argv[:1] == ["attention"]:
        return _attention(argv[1:])
    return _strategies([argument for argument in argv if argument != "--debug"])


def _strategies(argv: list[str]) -> int:
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    from .arguments import read_arguments
    from .plot import require_matplotlib, save_plot
    from .run import run_bench, save

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bar()
    logging.getLogger("trl_packfa").setLevel(logging.ERROR)
    wanted = read_arguments(argv).bench
    if wanted.plot:
        require_matplotlib()
    report = run_bench(argv, tell=lambda text: print(text, file=sys.stderr, flush=True))
    if wanted.output:
        save(report, wanted.output)
    show(report, operations=wanted.profile)
    if wanted.plot:
        save_plot(report, wanted.plot)
    return int(any("failed" in side for side in report["sides"]))


def show(report: dict[str, Any], *, operations: bool = False) -> None:
    """Print tables and remarks."""
    from .table import heading, operation_rows, remarks, speed_rows, training_rows

    print(heading(report))
    print_rows(speed_rows(report))
    print_rows(training_rows(report))
    for line in remarks(report):
        print(f"! {line}")
    for side in report["sides"] if operations else []:
        print(f"{side['side']}, one step:")
        print_rows(operation_rows(side))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of dictionaries with the same keys; nothing for none."""
    if not rows:
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    # In a pipe there is no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _attention(argv: list[str]) -> int:
    from .attention import bench_attention

    parser = argparse.ArgumentParser(prog="trl-packfa bench attention")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], help="row lengths")
    parser.add_argument("--lengths", help="JSON list of document lengths in tokens, instead of a log-normal")
    parser.add_argument("--repeats", type=int, default=3, help="draws of documents per row length")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args([argument for argument in argv if argument != "--debug"])
    rows = bench_attention(tokens=args.tokens, source=args.lengths, repeats=args.repeats)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print_rows(rows)
    return 0
