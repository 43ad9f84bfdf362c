"""`trl-packfa demo`: a complete packed QLoRA fine-tune that needs no download."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ..versions import require_versions
from .output import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    demo = commands.add_parser("demo", help="packed QLoRA fine-tune with proof, on a CPU, without downloads")
    demo.add_argument("--model", help="name or path of a base model instead of the built-in one")
    demo.add_argument("--dataset", help="file or name of a dataset instead of Python's docstrings")
    demo.add_argument("--output-dir", type=Path, default=Path("demo-output"))
    demo.add_argument("--base-steps", type=int, default=50, help="optimizer steps of the built-in base model")
    demo.add_argument("--steps", type=int, default=30, help="optimizer steps of the QLoRA fine-tune")
    demo.add_argument("--batch-size", type=int, default=16, help="examples per micro-batch")
    demo.add_argument("--max-length", type=int, default=1024, help="maximum document length in tokens")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo with these options."""
    require_versions()
    from ..demo.run import DemoOptions, run_demo

    run_demo(DemoOptions(**{option.name: getattr(args, option.name) for option in fields(DemoOptions)}))
    return 0
