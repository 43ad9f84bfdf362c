"""`trl-packfa models`: what packing does on every causal-LM type of transformers, and under every tuner of PEFT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from .output import add_json, print_rows


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "list every causal-LM type of transformers and what packing does there"
    models = commands.add_parser("models", help=text)
    text = "build, patch and check every type, and write the results"
    models.add_argument("--run", dest="measure", action="store_true", help=text)
    models.add_argument("--output", type=Path, help="results file of --run (default: the package's own)")
    models.add_argument("--jobs", type=int, default=2, help="processes of --run")
    models.add_argument("--adapters", action="store_true", help="PEFT's tuners instead of model types")
    models.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    add_json(models)
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the results, measured anew if asked."""
    if args.adapters:
        return _run_adapters(args)
    from .. import matrix
    from ..results import RESULTS, results

    types = results()
    if args.measure:
        types = matrix.run(args.output or RESULTS, jobs=args.jobs, seen=_show)["types"]
    if args.markdown:
        print(matrix.markdown(types))
        return 0
    return print_rows(matrix.rows(types), as_json=args.json)


def _run_adapters(args: argparse.Namespace) -> int:
    from ..adapters import measure, table

    kinds = table.results()
    if args.measure:
        kinds = measure.run(args.output or table.RESULTS, seen=_show)
    if args.markdown:
        print(table.markdown(kinds))
        return 0
    return print_rows(table.rows(kinds), as_json=args.json)


def _show(name: str, result: Mapping[str, object]) -> None:
    print(f"{name}: {result['verdict']} {result.get('level', '')}", file=sys.stderr)
