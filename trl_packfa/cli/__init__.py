"""The commands of `trl-packfa`, one file each. `add` declares a command on argparse, `run` executes it.

Heavy imports wait until a command runs, so `--help` is instant. Commands with training arguments have a line `HELP`
in place of `add`: TRL's own parser reads their flags, which are too slow to load.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from ..versions import __version__
from . import bench, check, completion, demo, env, merge, models, plan, prepare, recipes, train

# `--help` lists them in this order. To add a command, write a file with `add(commands)` and name it here.
COMMANDS = (train, plan, prepare, demo, check, bench, merge, models, recipes, env, completion)
OWN_PARSERS = {"train": train.run, "plan": plan.run, "prepare": prepare.run, "bench": bench.run}

__all__ = ["COMMANDS", "OWN_PARSERS", "build_parser", "name_of"]

_EXIT_CODES = "exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 packing is not exact, 130 interrupted"


def name_of(command: ModuleType) -> str:
    """Return the word that runs a command."""
    return command.__name__.rpartition(".")[2]


def build_parser(*, train: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the flags of the parser `train`, which take long to load."""
    parser = argparse.ArgumentParser(
        prog="trl-packfa", description="Exact sequence packing for TRL.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"trl-packfa {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = name_of(command)
        if name in OWN_PARSERS:
            flags = [train] if name == "train" and train is not None else []
            told = f"{command.HELP} (see: trl-packfa {name} --help)"
            commands.add_parser(name, help=told, parents=flags, add_help=False)
        else:
            command.add(commands)
    commands.choices["completion"].set_defaults(build_parser=build_parser)
    return parser
