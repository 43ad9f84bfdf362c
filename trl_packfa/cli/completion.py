"""`trl-packfa completion`: a shell completion script, which shtab makes from the parsers."""

from __future__ import annotations

import argparse

from ..errors import VersionTooOld
from .output import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    completion = commands.add_parser("completion", help="print a completion script for your shell")
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(run=run)  # `cli.build_parser` also sets `build_parser` here


def run(args: argparse.Namespace) -> int:
    """Print the completion script; raise [`VersionTooOld`] if shtab is not installed."""
    try:
        import shtab  # type: ignore[import-not-found]  # optional
    except ImportError as error:
        raise VersionTooOld(
            "completion scripts need shtab, which is not installed.", do="pip install 'trl-packfa[completion]'"
        ) from error
    from ..trainers.sft.script import train_parser

    print(shtab.complete(args.build_parser(train=train_parser(add_help=False)), shell=args.shell))
    return 0
