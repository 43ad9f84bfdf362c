"""The commands of `trl-packfa`. `add` in a file declares a command on argparse, `run` executes it.

Heavy imports wait until a command runs, so `--help` is instant. TRL's own parser, which is slow to load, reads the
flags of commands with training arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

from ..versions import __version__
from . import check, demo, env, merge, models, recipes
from .output import Commands


def _loaded(module: str, name: str) -> Callable[[list[str]], int]:
    """Return a command that takes its flags; its module is imported when it is called."""
    return lambda argv: getattr(import_module(module, __package__), name)(argv)


OWN_PARSERS = {
    "train": _loaded("..scripts.train", "train"),
    "plan": _loaded("..plan.run", "plan"),
    "prepare": _loaded("..scripts.prepare", "prepare"),
    "bench": _loaded("..bench.run", "bench"),
}
# In the order of `--help`: the function that declares a command, or the help of a command with a parser of its own.
COMMANDS: dict[str, str | Callable[[Commands], None]] = {
    "train": "train with SFT, DPO, KTO, reward modeling, GRPO or RLOO from YAML or flags",
    "plan": "predict the effect of packing on a dataset, before you rent a GPU",
    "prepare": "tokenize, cut and count the data of a run once, into a folder",
    "demo": demo.add,
    "check": check.add,
    "bench": "packed and padded training side by side",
    "merge": merge.add,
    "models": models.add,
    "recipes": recipes.add,
    "env": env.add,
}
_EXIT_CODES = "exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 packing is not exact, 130 interrupted"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="trl-packfa", description="Exact sequence packing for TRL.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"trl-packfa {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add in COMMANDS.items():
        if isinstance(add, str):
            commands.add_parser(name, help=f"{add} (see: trl-packfa {name} --help)", add_help=False)
        else:
            add(commands)
    return parser
