"""`trl-packfa bench`: time and memory on this machine."""

from __future__ import annotations

import argparse

from .output import add_json, print_rows


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    bench = commands.add_parser("bench", help="time and memory of packed attention on this machine's CPU")
    bench.add_argument("what", choices=["attention"])
    bench.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], help="row lengths")
    bench.add_argument("--lengths", help="JSON list of document lengths in tokens, instead of a log-normal")
    bench.add_argument("--repeats", type=int, default=3, help="draws of documents per row length")
    add_json(bench)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from ..bench import bench_attention

    rows = bench_attention(tokens=args.tokens, source=args.lengths, repeats=args.repeats)
    return print_rows(rows, as_json=args.json)
