"""Entry point of the command line `trl-packfa`: one command, its errors as messages, and its exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from difflib import get_close_matches

from ..errors import ContaminationError, PackingError
from ..versions import require_versions
from . import COMMANDS, OWN_PARSERS, build_parser
from .check import NOT_EXACT

# At import, bitsandbytes reports a missing optional Hub kernel. Nothing here needs that kernel. The processes that the
# benchmark starts import this file first.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Defaults of tqdm in a pipe: no bar for work of less than five seconds, then one line every half minute.
_BARS_AS_LINES = {
    "TQDM_DELAY": "5",
    "TQDM_MININTERVAL": "30",
    "TQDM_BAR_FORMAT": "{desc}: {n_fmt}/{total_fmt}, {remaining} to go\n",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # PEFT and TRL still use old names of transformers. Users cannot fix that. Warnings about their own arguments stay.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    _bars_as_lines()
    argv, debug = _split_debug(argv)
    if argv and argv[0] in OWN_PARSERS:
        return _guarded(lambda: _train_command(argv[0], argv[1:]), debug=debug)
    parser = build_parser()
    if argv and (meant := get_close_matches(argv[0], COMMANDS, n=1)):
        if argv[0] != meant[0]:
            parser.error(f"there is no command '{argv[0]}'. Did you mean {meant[0]}?")
    args = parser.parse_args(argv)
    return _guarded(lambda: args.run(args), debug=debug)


def _train_command(name: str, argv: list[str]) -> int:
    require_versions()
    return OWN_PARSERS[name](argv)


def _bars_as_lines() -> None:
    """Replace progress bars by an occasional line if stderr is a pipe or a file.

    tqdm draws the bars of datasets and transformers. It reads its defaults from the environment at import.
    """
    if not sys.stderr.isatty() and "tqdm" not in sys.modules:
        for name, value in _BARS_AS_LINES.items():
            os.environ.setdefault(name, value)


def _split_debug(argv: list[str]) -> tuple[list[str], bool]:
    """Remove our `--debug` flag; return the other arguments and whether the flag was there.

    A `--debug` with a value belongs to the Trainer and stays.
    """
    followers = [*argv[1:], "--"]
    ours = {at for at, word in enumerate(argv) if word == "--debug" and (at == 0 or followers[at].startswith("-"))}
    return [word for at, word in enumerate(argv) if at not in ours], bool(ours)


def _guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command and return its exit code; print errors that a user can act on as one message."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `trl-packfa models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PackingError as error:
        if debug:
            raise
        print(f"trl-packfa: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_EXACT if isinstance(error, ContaminationError) else 1
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        print("\n".join(["trl-packfa: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except Exception as error:
        library = _refused_by(error)
        if debug or library is None:
            raise
        print(f"trl-packfa: {type(error).__name__} of {library}: {error}\n{_LOOK}", file=sys.stderr)
        return 1


# These libraries check a user's input and raise errors that say what to do.
_LIBRARIES = {"accelerate", "bitsandbytes", "datasets", "huggingface_hub", "peft", "tokenizers", "transformers", "trl"}
_LOOK = "`trl-packfa --debug COMMAND ...` shows where."


def _refused_by(error: Exception) -> str | None:
    """Return the library whose own check raised an error.

    `None` means that the error may be a fault of the code, so the user needs the traceback.
    """
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return None
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    library = str(innermost.f_globals.get("__name__", "")).partition(".")[0]
    return library if library in _LIBRARIES else None


if __name__ == "__main__":
    sys.exit(main())
