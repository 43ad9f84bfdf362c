"""`trl-packfa models`: what packing does on every causal-LM type of transformers, and under every tuner of PEFT."""

from __future__ import annotations

import argparse

from .output import add_json, print_rows


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "list every causal-LM type of transformers and what packing does there"
    models = commands.add_parser("models", help=text)
    models.add_argument("--adapters", action="store_true", help="PEFT's tuners instead of model types")
    models.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    add_json(models)
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was measured."""
    if args.adapters:
        from ..adapters import table

        found = table.results()
    else:
        from ..patches.measured import results
        from . import model_table as table

        found = results()
    if args.markdown:
        print(table.markdown(found))
        return 0
    return print_rows(table.rows(found), as_json=args.json)
