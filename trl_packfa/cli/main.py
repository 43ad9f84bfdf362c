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
from ..terminal import BARS_AS_LINES
from . import OWN_PARSERS, build_parser
from .check import NOT_EXACT


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # bitsandbytes announces at import that an optional Hub kernel is missing; nothing here needs it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # What PEFT and TRL call by transformers' old names is not the user's to mend; their own arguments' names are.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    _bars_as_lines()
    argv, debug = _split_debug(argv)
    if argv and argv[0] in OWN_PARSERS:  # TRL's own parser reads everything that takes training arguments
        return _guarded(lambda: OWN_PARSERS[argv[0]](argv[1:]), debug=debug)
    args = build_parser().parse_args(argv)
    return _guarded(lambda: args.run(args), debug=debug)


def _bars_as_lines() -> None:
    """In a pipe or a file, let what takes long write a line now and then, in the place of a bar.

    tqdm, which draws the bars of datasets and transformers, reads its defaults from the environment when it is
    imported.
    """
    if not sys.stderr.isatty() and "tqdm" not in sys.modules:
        for name, value in BARS_AS_LINES.items():
            os.environ.setdefault(name, value)


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


# Libraries that check what a user passes, and raise with what to do about it.
_LIBRARIES = {"accelerate", "bitsandbytes", "datasets", "huggingface_hub", "peft", "tokenizers", "transformers", "trl"}
_LOOK = "`trl-packfa --debug COMMAND ...` shows where."


def _refused_by(error: Exception) -> str | None:
    """Name the library whose own check raised an error; `None` for an error that may be a fault of the code, of which
    the whole traceback is wanted."""
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return None
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = str(innermost.tb_frame.f_globals.get("__name__", "")) if innermost else ""
    library = module.split(".", 1)[0]
    return library if library in _LIBRARIES else None


if __name__ == "__main__":
    sys.exit(main())
