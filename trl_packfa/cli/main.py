"""`trl-packfa`: the command line. The commands are in the files beside this one.

Exit codes: 0 done; 1 refused, or failed, with a message on stderr; 2 wrong usage; 3 packing is not exact on this
model; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable

from ..errors import ContaminationError, PackingError
from . import OWN_PARSERS, build_parser
from .check import NOT_EXACT


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # bitsandbytes announces at import that an optional Hub kernel is missing; nothing here needs it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # What PEFT and TRL call by transformers' old names is not the user's to mend; their own arguments' names are.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    argv, debug = _split_debug(argv)
    if argv and argv[0] in OWN_PARSERS:  # TRL's own parser reads everything that takes training arguments
        return _guarded(lambda: OWN_PARSERS[argv[0]](argv[1:]), debug=debug)
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
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `trl-packfa models | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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


if __name__ == "__main__":
    sys.exit(main())
