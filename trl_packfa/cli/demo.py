"""`trl-packfa demo`: a complete packed QLoRA fine-tune that needs no download."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ..demo import DemoOptions
from ..versions import require_versions
from .output import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    demo = commands.add_parser("demo", help="checked and packed QLoRA fine-tune, on a CPU, without downloads")
    for option in fields(DemoOptions):
        kind = str if option.default is None else type(option.default)
        demo.add_argument(f"--{option.name}", type=kind, default=option.default, help=option.metadata["help"])
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo with these options."""
    require_versions()
    from ..demo.run import run_demo

    run_demo(DemoOptions(**{option.name: getattr(args, option.name) for option in fields(DemoOptions)}))
    return 0
