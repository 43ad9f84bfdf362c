"""`trl-packfa`: the command line. The commands are in `commands/`.

Exit codes: 0 done; 1 refused, or failed, with a message on stderr; 2 wrong usage; 3 packing is not exact on this
model; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from . import __version__
from .commands import COMMANDS
from .commands.check import NOT_EXACT
from .commands.train import run as train
from .errors import ContaminationError, PackingError

_EXIT_CODES = "exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 packing is not exact, 130 interrupted"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # bitsandbytes announces at import that an optional Hub kernel is missing; nothing here needs it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    argv, debug = _split_debug(argv)
    if argv[:1] == ["train"]:  # TRL's own parser reads everything that takes training arguments
        return _guarded(lambda: train(argv[1:]), debug=debug)
    args = build_parser().parse_args(argv)
    return _guarded(lambda: args.run(args), debug=debug)


def _split_debug(argv: list[str]) -> tuple[list[str], bool]:
    """The arguments without our `--debug`, and whether it was there; one with a value is the Trainer's."""
    followers = [*argv[1:], "--"]
    ours = {at for at, word in enumerate(argv) if word == "--debug" and (at == 0 or followers[at].startswith("-"))}
    return [word for at, word in enumerate(argv) if at not in ours], bool(ours)


def _guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; what a user can act on becomes one message."""
    try:
        return command()
    except PackingError as error:
        if debug:
            raise
        print(f"trl-packfa: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_EXACT if isinstance(error, ContaminationError) else 1
    except KeyboardInterrupt:
        if debug:
            raise
        print("trl-packfa: interrupted", file=sys.stderr)
        return 130


def build_parser(*, train: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; with `train`, that command's flags too, which take long to load."""
    parser = argparse.ArgumentParser(
        prog="trl-packfa", description="Exact sequence packing for TRL.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"trl-packfa {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    if train is not None:
        commands.choices["train"]._actions[:] = train._actions
    return parser


if __name__ == "__main__":
    sys.exit(main())
