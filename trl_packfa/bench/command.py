"""`trl-packfa bench` compares strategies; `bench attention` and `bench check` measure one part."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..terminal.tables import print_table


def bench(argv: list[str]) -> int:
    """Run the benchmark and return the exit code: 0 done, 1 if a side failed."""
    argv = [argument for argument in argv if argument != "--debug"]
    parts = {"attention": _attention, "check": _check}
    return parts[argv[0]](argv[1:]) if argv and argv[0] in parts else _strategies(argv)


def _strategies(argv: list[str]) -> int:
    from ..terminal.quiet import quiet
    from .arguments import read_arguments
    from .plot import require_matplotlib, save_plot
    from .run import run_bench, save

    wanted = read_arguments(argv).bench
    if wanted.plot:
        require_matplotlib()

    def keep(report: dict[str, Any]) -> None:
        if wanted.output:
            save(report, wanted.output)

    with quiet():
        # Written after each side too, so that a run that is cut off keeps the sides before.
        report = run_bench(argv, tell=lambda text: print(text, file=sys.stderr, flush=True), seen=keep)
        keep(report)
    show(report, operations=wanted.profile)
    if wanted.plot:
        save_plot(report, wanted.plot)
    return int(any("failed" in side for side in report["sides"]))


def show(report: dict[str, Any], *, operations: bool = False) -> None:
    """Print the tables and remarks of a report."""
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
    """Print dictionaries with the same keys as a table; print nothing for an empty list."""
    if rows:
        print_table(rows)


def _attention(argv: list[str]) -> int:
    from .attention import FEW_HEADS, Heads, bench_attention
    from .mixes import MIXES

    what = "Measure one attention, forward and backward, per row length and mix of documents."
    parser = rows_parser(what, prog="trl-packfa bench attention")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**n for n in range(10, 18)], help="row lengths")
    parser.add_argument("--mixes", nargs="+", default=["even", "uneven"], help=f"{', '.join(MIXES)}, or a .json file")
    parser.add_argument("--lengths", nargs="+", default=[], help="JSON lists of document lengths, instead of mixes")
    parser.add_argument("--sides", nargs="+", help="backends and transformers' paths (default: all)")
    parser.add_argument("--heads", type=int, default=FEW_HEADS.query, help="query heads")
    parser.add_argument("--key_value_heads", type=int, default=FEW_HEADS.key_value, help="key/value heads")
    parser.add_argument("--head_dim", type=int, default=FEW_HEADS.dim, help="size of a head")
    parser.add_argument("--repeats", type=int, default=3, help="number of random draws of documents")
    parser.add_argument("--slowest", type=float, default=60.0, help="skip a side that needs more seconds than this")
    args = parser.parse_args(argv)
    return show_rows(
        bench_attention(
            tokens=args.tokens,
            mixes=args.lengths or args.mixes,
            sides=args.sides,
            heads=Heads(args.heads, args.key_value_heads, args.head_dim),
            repeats=args.repeats,
            slowest=args.slowest,
        ),
        as_json=args.json,
    )


def rows_parser(description: str, *, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for a measurement that prints rows, with the flag `--json`."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def show_rows(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print the rows of a measurement and return exit code 0."""
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_rows([{name: "-" if value is None else value for name, value in row.items()} for row in rows])
    return 0


def _check(argv: list[str]) -> int:
    from .proof import bench_check

    return show_rows(bench_check([argument for argument in argv if argument != "--json"]), as_json="--json" in argv)
