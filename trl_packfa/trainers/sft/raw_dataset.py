"""Checks of a dataset before TRL tokenizes it: is it empty, has it a format of TRL, are its values whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from trl import is_conversational

from ...errors import InvalidDataset
from ..common.columns import columns_advice, suggested_columns
from ..common.dataset import TEXT_COLUMNS, AnyDataset
from ..common.dataset_checks import require_whole, without_format
from ..common.model_loading import EvalDataset
from .config import PackedSFTConfig


def prepares(args: PackedSFTConfig) -> bool:
    """Tell whether TRL tokenizes and labels datasets; `skip_prepare_dataset` switches it off."""
    kwargs: Any = args.dataset_kwargs or {}
    return not kwargs.get("skip_prepare_dataset", False)


def require_usable(dataset: Dataset | IterableDataset, *, name: str, args: PackedSFTConfig, formatted: bool) -> None:
    """Refuse a dataset that is empty, or whose first example has no TRL format, before anything is tokenized.

    `formatted`: the user's own function turns examples into text.
    """
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
    """Check the training and evaluation datasets before tokenizing; return them, with plain Python values if packed.

    `formatted`: the user's own function turns examples into text.
    """

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
