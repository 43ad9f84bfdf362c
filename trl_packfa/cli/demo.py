"""`trl-packfa demo`: a complete packed QLoRA fine-tune that needs no download."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..versions import require_versions
from .output import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    demo = commands.add_parser("demo", help="checked and packed QLoRA fine-tune, on a CPU, without downloads")
    demo.add_argument("--model", help="name or path of a base model, not the built-in one")
    demo.add_argument("--dataset", help="file or name of a dataset, not Python's docstrings")
    demo.add_argument("--output_dir", type=Path, default=Path("demo-output"), help="folder of adapter and reports")
    demo.add_argument("--base_steps", type=int, default=50, help="optimizer steps of the built-in base model")
    demo.add_argument("--steps", type=int, default=30, help="optimizer steps of the QLoRA fine-tune")
    demo.add_argument("--batch_size", type=int, default=16, help="examples per micro-batch")
    demo.add_argument("--max_length", type=int, default=1024, help="maximum document length in tokens")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo with these options."""
    require_versions()
    from ..demo.run import run_demo

    return run_demo(args)
