"""`trl-packfa demo`: a complete packed QLoRA fine-tune without downloads, with the classes that a user would take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo, each a flag of the command."""

    model: str | None = field(default=None, metadata={"help": "name or path of a base model, not the built-in one"})
    dataset: str | None = field(default=None, metadata={"help": "file or name of a dataset, not Python's docstrings"})
    output_dir: Path = field(default=Path("demo-output"), metadata={"help": "folder of adapter and reports"})
    base_steps: int = field(default=50, metadata={"help": "optimizer steps of the built-in base model"})
    steps: int = field(default=30, metadata={"help": "optimizer steps of the QLoRA fine-tune"})
    batch_size: int = field(default=16, metadata={"help": "examples per micro-batch"})
    max_length: int = field(default=1024, metadata={"help": "maximum document length in tokens"})
