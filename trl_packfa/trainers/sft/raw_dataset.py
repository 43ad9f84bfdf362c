"""Checks of a dataset before TRL tokenizes it, and columns made from those of other formats, such as Alpaca's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from trl import is_conversational

from ...errors import InvalidConfig, InvalidDataset
from ..common.dataset import TEXT_COLUMNS, AnyDataset
from ..common.dataset_checks import require_whole, without_format
from ..common.model_loading import EvalDataset
from .config import PackedSFTConfig


def prepares(args: PackedSFTConfig) -> bool:
    """Tell whether TRL tokenizes and labels datasets; `skip_prepare_dataset` switches it off."""
    kwargs: Any = args.dataset_kwargs or {}
    return not kwargs.get("skip_prepare_dataset", False)


def require_usable(dataset: Dataset | IterableDataset, *, name: str, args: PackedSFTConfig, formatted: bool) -> None:
    """Refuse a dataset that is empty, or whose first example has no TRL format, before anything is tokenized."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise InvalidDataset(
            f"{name}_dataset must be a `Dataset` or `IterableDataset`, not {type(dataset).__name__}.",
            do="Name one of its splits." if isinstance(dataset, dict) else "",
        )
    example = next(iter(dataset), None)
    if example is None:
        raise InvalidDataset(f"the {name} dataset is empty.", do="Check the split, filters and file names.")
    for column in TEXT_COLUMNS:
        if isinstance(example.get(column), list) and not example[column]:
            raise InvalidDataset(
                f"the first example of the {name} dataset has no message in '{column}'.",
                do="Filter such examples out.",
            )
    if args.assistant_only_loss and not is_conversational(example):
        raise InvalidDataset(
            f"assistant_only_loss=True, but the {name} dataset holds no conversations.",
            why=[f"its columns are {sorted(example)}, and no message in them has a role"],
            do="Leave assistant_only_loss off, or bring messages with 'role' and 'content'.",
        )
    if formatted or not (args.packing or prepares(args)):  # the user's function or data collator handles any format
        return
    text_field = args.dataset_text_field
    expected: dict[str, type | tuple[type, ...]] = {
        "input_ids": (list, tuple, np.ndarray),
        "labels": (list, tuple, np.ndarray),
        "messages": list,
        "conversations": list,
        "prompt": (str, list),
        "completion": (str, list),
        text_field: str,
    }
    known = [column for column in expected if column in example]
    if not known or ("prompt" in example) != ("completion" in example):
        raise InvalidDataset(
            f"the {name} dataset has columns {sorted(example)}, which is no TRL format.",
            why=[f"wanted: '{text_field}', 'messages', 'prompt' and 'completion', or 'input_ids'"],
            do=_advice(example),
        )
    for column in known:
        if not isinstance(example[column], expected[column]):
            raise InvalidDataset(
                f"column '{column}' of the {name} dataset holds {type(example[column]).__name__}, "
                f"expected {_names(expected[column])}.",
                do="Convert the column before training.",
            )


def _advice(example: dict[str, Any]) -> str:
    if {"chosen", "rejected"} <= example.keys():
        return "To train on pairs, use --trainer dpo or reward: PackedDPOTrainer, PackedRewardTrainer."
    made = columns_advice(suggested_columns(example))
    return made or "Rename the columns, set dataset_text_field, or pass formatting_func."


def usable(
    train: AnyDataset | None, evaluation: EvalDataset | None, *, args: PackedSFTConfig, formatted: bool
) -> tuple[Any, Any]:
    """Check training and evaluation datasets before tokenizing; return them, with plain Python values if packed."""

    def look(name: Any, dataset: Any) -> Any:
        dataset = without_format(dataset) if args.packing else dataset
        require_usable(dataset, name=name, args=args, formatted=formatted)
        if not args.packing:
            return dataset
        columns = () if formatted else (*TEXT_COLUMNS, args.dataset_text_field)
        return require_whole(dataset, name=name, columns=columns)

    if isinstance(evaluation, dict):
        looked: Any = {name: look(name, dataset) for name, dataset in evaluation.items()}
    else:
        looked = None if evaluation is None else look("eval", evaluation)
    return None if train is None else look("train", train), looked


def _names(types: type | tuple[type, ...]) -> str:
    return " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))


# Names in other formats for a prompt, for more text of the prompt, and for the answer. The first existing one is used.
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_BESIDE_PROMPTS = ("input", "context")
_ANSWERS = ("output", "answer", "response", "solution", "completion", "target")


def suggested_columns(example: Mapping[str, Any]) -> dict[str, str]:
    """Suggest templates that make 'prompt' and 'completion' from the columns of another format, such as Alpaca's.

    The result is empty if the example has no prompt and answer in text.

    Example: `{"instruction": "Add.", "input": "1 2", "output": "3"}` gives `{"prompt": "{instruction}\\n{input}\\n",
    "completion": "{output}"}`.
    """
    texts = [column for column, value in example.items() if isinstance(value, str) or value is None]
    prompt = next((column for column in _PROMPTS if column in texts), None)
    answer = next((column for column in _ANSWERS if column in texts and column != prompt), None)
    if prompt is None or answer is None:
        return {}
    beside = [column for column in _BESIDE_PROMPTS if column in texts and column != prompt]
    parts = [prompt, *beside[:1]]
    return {"prompt": "".join(f"{{{part}}}\n" for part in parts), "completion": f"{{{answer}}}"}


def columns_advice(templates: Mapping[str, str]) -> str:
    """Say how to make the columns, on the command line and in Python; return `""` without templates."""
    if not templates:
        return ""
    shown = {name: template.replace("\n", "\\n") for name, template in templates.items()}
    flags = " ".join(f"'{name}={template}'" for name, template in shown.items())
    made = ", ".join(f'"{name}": "{template}".format(**row)' for name, template in shown.items())
    return f"Pass --columns {flags} to `trl-packfa train`, or call\ndataset = dataset.map(lambda row: {{{made}}})"


def make_columns(dataset: Any, templates: Sequence[str] | None) -> Any:
    """Make new columns from others, and remove the columns that were used.

    Each template is `NAME=TEMPLATE`, with column names in braces and `\\n` for a line break. `None` is read as "".
    """
    if not templates:
        return dataset
    made: dict[str, str] = {name: made_of for name, _, made_of in (one.partition("=") for one in templates)}
    there = dataset.column_names or list(next(iter(dataset), {}))
    try:
        parsed = [part for template in made.values() for part in Formatter().parse(template)]
        used = {column for _, column, _, _ in parsed if column is not None}
    except ValueError as error:
        raise InvalidConfig(f"columns={list(templates)}: {error}.", do="Write a brace that is text twice.") from error
    unknown = sorted(used - set(there))
    if unknown or not all(made.values()):
        raise InvalidConfig(
            f"columns={list(templates)} cannot make columns from {sorted(there)}.",
            why=[f"the dataset has no column {name!r}" for name in unknown] or ["a template is NAME=TEMPLATE"],
            do="Write for example --columns 'prompt={question}\\n' 'completion={answer}'.",
        )
    made = {name: template.replace("\\n", "\n") for name, template in made.items()}
    return dataset.map(_filled_in, fn_kwargs={"templates": made}, remove_columns=sorted(used - set(made)))


def _filled_in(row: dict[str, Any], templates: dict[str, str]) -> dict[str, str]:
    texts = {name: "" if value is None else value for name, value in row.items()}
    return {name: template.format(**texts) for name, template in templates.items()}
