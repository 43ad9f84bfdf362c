"""Flags and YAML on TRL's own parser, and what `train` takes beside TRL's arguments."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..errors import InvalidConfig, PackingError

_FLAG, SFT_NAME = "--trainer", "sft"


@dataclass
class ColumnChoice:
    """Says what is read of a dataset."""

    columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns to make of the dataset's own, each NAME=TEMPLATE with columns in braces, and `\\n` for a "
            "line break: `--columns 'prompt={instruction}\\n' 'completion={output}'`."
        },
    )


@dataclass
class TrainerChoice(ColumnChoice):
    """Arguments of `train` that are neither TRL's nor a config's: which trainer runs, on what of the dataset."""

    trainer: str = field(
        default=SFT_NAME,
        metadata={
            "help": "What is trained: `sft`, or on pairs `dpo`, a model against a reference, `reward`, a reward "
            "model, or `kto`, on single answers that are good or bad; on prompts `grpo` or `rloo`, against "
            "`--reward_funcs`. The other arguments are its config's.",
            "choices": ["sft", "dpo", "reward", "kto", "grpo", "rloo"],
        },
    )
    preview: bool = field(
        default=False,
        metadata={"help": "Print a packed batch before training: its documents, and what of them is trained."},
    )


def asked_trainer(argv: list[str]) -> str:
    """The trainer that flags or the YAML file name, before their parser is built; a wrong name is the parser's to
    refuse."""
    names = TrainerChoice.__dataclass_fields__["trainer"].metadata["choices"]
    asked = _value_of(_FLAG, argv)
    config = _value_of("--config", argv)
    if asked is None and config is not None and Path(config).is_file():
        with open(config, encoding="utf-8") as file:
            try:
                content = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise InvalidConfig(f"{config} is no YAML: {error}.", do="Mend that line.") from error
        asked = content.get("trainer") if isinstance(content, dict) else None
    return str(asked) if asked in names else SFT_NAME


def _value_of(flag: str, argv: list[str]) -> str | None:
    """`--flag value` or `--flag=value`, the last one."""
    found = [after for word, after in pairwise(argv) if word == flag]
    found += [word.split("=", 1)[1] for word in argv if word.startswith(f"{flag}=")]
    return found[-1] if found else None


def make_parser(classes: Any, *, prog: str, **options: Any) -> TrlParser:
    """TRL's parser. argparse shows its usage above each error: of 250 arguments it would bury what is wrong."""
    usage = f"{prog} [--config FILE.yaml] [--ARGUMENT VALUE ...]      {prog} --help lists all arguments"
    return TrlParser(classes, prog=prog, usage=usage, **options)


def parse(
    classes: tuple[type, ...], argv: list[str], *, prog: str, defaults: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """Flags and `--config FILE.yaml` on TRL's own parser, one instance of each class; `defaults` are weaker than both.

    Raises:
        [`InvalidConfig`]: for what TRL or transformers refuse; our own errors pass.
    """
    parser = make_parser(classes, prog=prog)
    parser.set_defaults(**(defaults or {}))
    # TRL's own default of it, which nobody has to answer for.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        return parser.parse_args_and_config(args=argv, fail_with_unknown_args=True)
    except PackingError:
        raise
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise InvalidConfig(str(error), do=_meant(str(error), classes)) from error


def _meant(message: str, classes: tuple[type, ...]) -> str:
    """Arguments that exist, for those that a message quotes and that are nearly one."""
    known = [f.name for cls in classes for f in fields(cls)]
    named = re.findall(r"'(?:--)?(\w+)'", message)
    close = [match for name in named if name not in known for match in get_close_matches(name, known, n=1)]
    return f"Did you mean {', '.join(close)}?" if close else ""
