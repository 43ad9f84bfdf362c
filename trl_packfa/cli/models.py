"""`trl-packfa models`: measured results of causal LMs, models with images, encoders, and PEFT's tuners."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..versions import installed_version
from .output import add_json, described, print_rows


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    text = "list every causal-LM type of transformers with the measured result of packing"
    models = commands.add_parser("models", help=text)
    models.add_argument("--adapters", action="store_true", help="list PEFT's tuners instead of model types")
    models.add_argument("--images", action="store_true", help="list the types with images or sounds instead")
    models.add_argument("--encoders", action="store_true", help="list encoders by head instead")
    models.add_argument("--markdown", action="store_true", help="print the table as in the documentation")
    add_json(models)
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the measured results."""
    if args.adapters:
        from ..adapters import table

        found, versions = table.results(), table.measured_with()
    elif args.images:
        from ..patches.measured import composites
        from . import composite_table as table

        found, versions = composites()["types"], composites()["versions"]
    elif args.encoders:
        from ..patches.measured import encoders
        from . import encoder_table as table

        found, versions = encoders()["types"], encoders()["versions"]
    else:
        from ..patches.measured import measured_with, results
        from . import model_table as table

        found, versions = results(), measured_with()
    if args.markdown:
        print(table.markdown(found))
        return 0
    if not args.json:
        print(_measured(versions))
    return print_rows(table.rows(found), as_json=args.json)


def _measured(versions: Mapping[str, str]) -> str:
    """Return a line with the versions that a table was measured with, and the installed ones that differ."""
    here = {name: installed_version(name) for name in versions}
    others = {name: version for name, version in here.items() if version not in versions[name].split(", ")}
    told = f"; here: {described(others)}; where the code differs, your model is checked" if others else ""
    return f"measured with {described(versions)}{told}"
