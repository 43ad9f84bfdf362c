"""Parsing of flags and YAML with TRL's own parser, and the arguments of `train` that are not TRL's."""

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

from ..data.files import missing_path
from ..errors import InvalidConfig, PackingError

_FLAG, SFT_NAME = "--trainer", "sft"


@dataclass
class ColumnChoice:
    """Arguments that choose the columns of a dataset."""

    columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns to make from the dataset's own. Each is NAME=TEMPLATE with column names in braces, and "
            "`\\n` for a line break: `--columns 'prompt={instruction}\\n' 'completion={output}'`."
        },
    )


@dataclass
class TrainerChoice(ColumnChoice):
    """Arguments of `train` that belong neither to TRL nor to a config: the trainer, its columns, a preview."""

    trainer: str = field(
        default=SFT_NAME,
        metadata={
            "help": "The trainer. `sft` trains on texts. On pairs, `dpo` trains a model against a reference, and "
            "`reward` a reward model. `kto` trains on single answers that are good or bad. `grpo` and `rloo` train "
            "on prompts with `--reward_funcs`. The other arguments are those of its config.",
            "choices": ["sft", "dpo", "reward", "kto", "grpo", "rloo"],
        },
    )
    preview: bool = field(
        default=False,
        metadata={"help": "Print a packed batch before training: its documents, with the trained tokens marked."},
    )


def trainer_name(argv: list[str]) -> str:
    """Read the trainer's name from the flags or the YAML file, before the parser is built; `sft` for a wrong name."""
    names = TrainerChoice.__dataclass_fields__["trainer"].metadata["choices"]
    asked = _value_of(_FLAG, argv)
    config = _value_of("--config", argv)
    if asked is None and config is not None:
        asked = _content_of(config).get("trainer")
    return str(asked) if asked in names else SFT_NAME


def _content_of(config: str) -> dict[str, Any]:
    """Read a YAML file; return `{}` if there is no such file, or no mapping in it."""
    if not Path(config).is_file():
        return {}
    with open(config, encoding="utf-8") as file:
        try:
            content = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise InvalidConfig(f"{config} is no YAML: {error}.", do="Fix that line.") from error
    return content if isinstance(content, dict) else {}


def _value_of(flag: str, argv: list[str]) -> str | None:
    """Return the last value of a flag, from `--flag value` or `--flag=value`; `None` if there is none."""
    found = [after for word, after in pairwise(argv) if word == flag]
    found += [word.split("=", 1)[1] for word in argv if word.startswith(f"{flag}=")]
    return found[-1] if found else None


def make_parser(classes: Any, *, prog: str) -> TrlParser:
    """Build TRL's parser with a short usage, because argparse prints all 250 arguments above each error otherwise."""
    usage = f"{prog} [--config FILE.yaml] [--ARGUMENT VALUE ...]      {prog} --help lists all arguments"
    return TrlParser(classes, prog=prog, usage=usage)


def parse(
    classes: tuple[type, ...], argv: list[str], *, prog: str, defaults: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """Parse flags and `--config FILE.yaml` with TRL's parser into one instance of each class.

    Flags and file win over `defaults`.

    Raises:
        [`InvalidConfig`]: for arguments that TRL or transformers refuse. Our own errors are raised unchanged.
    """
    parser = make_parser(classes, prog=prog)
    parser.set_defaults(**(defaults or {}))
    # TRL's own default causes this warning, so the user can do nothing about it.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        return parser.parse_args_and_config(args=argv, fail_with_unknown_args=True)
    except PackingError:
        raise
    except FileNotFoundError as error:
        name = str(error.filename or error)
        raise InvalidConfig(f"cannot read {name}.", why=missing_path(name), do="Check the path.") from error
    except (ValueError, ImportError) as error:
        raise InvalidConfig(str(error), do=_unquoted(argv, classes) or _meant(str(error), classes)) from error


def _unquoted(argv: list[str], classes: tuple[type, ...]) -> str:
    """Name the words of the YAML file that YAML reads as a truth value where an argument takes a word; `""` for none.

    `no`, `off`, `yes` and `on` without quotes are `False` and `True`.
    """
    config = _value_of("--config", argv)
    content = _content_of(config) if config is not None else {}
    words = {f.name for cls in classes for f in fields(cls) if "bool" not in str(f.type)}
    found = [f'{name}: "{"yes" if value else "no"}"' for name, value in content.items()
             if isinstance(value, bool) and name in words]  # fmt: skip
    return f"YAML reads an unquoted no or yes as a truth value. Write {', '.join(found)}." if found else ""


def _meant(message: str, classes: tuple[type, ...]) -> str:
    """Suggest existing arguments that are similar to the wrong ones in a message; `""` if there are none."""
    known = [f.name for cls in classes for f in fields(cls)]
    named = re.findall(r"'(?:--)?(\w+)'", message)
    close = [match for name in named if name not in known for match in get_close_matches(name, known, n=1)]
    return f"Did you mean {', '.join(close)}?" if close else ""
