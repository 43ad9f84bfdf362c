"""Reads lengths and labels out of `datasets` for the packers, and cuts documents to the spans that they return.

Expects tokenized datasets with an `input_ids` column and, optionally, `labels` and `seq_lengths`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from trl import is_conversational

from ..collator import LOSSES, ROW_LENGTHS
from ..errors import InvalidConfig, InvalidDataset
from ..packing import WRAP, PackingReport, Spans, TrainedTokens, nothing_trains, plan_overflow
from .columns import columns_advice, suggested_columns
from .config import PackedSFTConfig

logger = logging.getLogger(__name__)

# Documents of a stream that are cut by one call.
_CUT_TOGETHER = 100


AnyDataset = Dataset | IterableDataset

# Columns of TRL's formats that it tokenizes.
TEXT_COLUMNS = ("messages", "conversations", "prompt", "completion")


class Tokens(NamedTuple):
    """What packing needs to know of a dataset: tokens of each document, int64 `(S,)`, and which have a label."""

    lengths: np.ndarray
    trained: TrainedTokens


def read_tokens(dataset: Dataset) -> Tokens:
    """Lengths and label masks of a tokenized dataset, read from Arrow without Python lists."""
    labels = "labels" if "labels" in dataset.column_names else "input_ids"
    rows = [ROW_LENGTHS] if ROW_LENGTHS in dataset.column_names else []
    masks = (_trained(table, labels) for table in _tables(dataset, labels, *rows))
    return Tokens(read_lengths(dataset), TrainedTokens.from_masks(masks))


def read_lengths(dataset: Dataset, column: str = "input_ids") -> np.ndarray:
    """Tokens of each document of a tokenized dataset, int64, shape `(S,)`; its labels are not read."""
    counted = dataset.select_columns([column]).with_format("arrow")
    # `datasets` keeps the result beside the dataset, under the fingerprint of its contents.
    counted = counted.map(
        _count, batched=True, batch_size=10_000, remove_columns=[column], fn_kwargs={"column": column},
        desc="Counting tokens",
    )  # fmt: skip
    parts = [table["length"].to_numpy() for table in _tables(counted, "length")]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def count_trained(dataset: Dataset) -> int:
    """Tokens of a tokenized dataset that have a label."""
    return sum(int((_flat(table["labels"]) != -100).sum()) for table in _tables(dataset, "labels"))


def _count(table: Any, column: str) -> Any:
    return pa.table({"length": pc.call_function("list_value_length", [table[column]]).cast(pa.int64())})


def _trained(table: Any, labels: str) -> np.ndarray:
    """Which tokens of some documents, one after the other, have a label; in a row that was packed before, no
    document's first token has one."""
    mask = _flat(table[labels]) != -100
    if ROW_LENGTHS in table.column_names:
        lengths = _flat(table[ROW_LENGTHS])
        mask[np.cumsum(lengths) - lengths] = False
    return mask


def _tables(dataset: Dataset, *columns: str) -> Iterator[Any]:
    """Some columns as `pyarrow.Table`s, which `datasets` does not say."""
    return dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    # `flatten`, not `values`: of a slice the latter holds what lies outside of it as well.
    return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])


def without_our_columns(dataset: AnyDataset) -> AnyDataset:
    """A dataset as the user passed it, without columns whose names mean something else here: ours, and of documents
    that are not tokenized yet the lengths of packed rows."""
    columns = dataset.column_names or list(next(iter(dataset), {}))
    ours = {LOSSES} if "input_ids" in columns else {LOSSES, ROW_LENGTHS}
    found = [name for name in columns if name in ours]
    return dataset.remove_columns(found) if found else dataset


def take_apart(dataset: AnyDataset, *, name: str) -> AnyDataset:
    """Rows that were packed before (`seq_lengths`) as the documents in them; other columns repeat for each."""
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if ROW_LENGTHS not in columns:
        return dataset
    options: dict[str, Any] = {"batched": True, "batch_size": _CUT_TOGETHER, "remove_columns": [ROW_LENGTHS]}
    if isinstance(dataset, IterableDataset):
        return dataset.map(_documents, **options)
    return dataset.map(_documents, desc=f"Taking rows of the {name} dataset apart", **options)


def _documents(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    documents: dict[str, list[Any]] = {column: [] for column in rows if column != ROW_LENGTHS}
    for i, lengths in enumerate(rows[ROW_LENGTHS]):
        # Lengths [2, 3] of a row of 5 tokens: stops [2, 5].
        stops = np.cumsum(lengths or [len(rows["input_ids"][i])]).tolist()
        for column, values in documents.items():
            value = rows[column][i]
            by_token = column in ("input_ids", "labels")
            values += [
                value[start:stop] if by_token else value for start, stop in zip([0, *stops[:-1]], stops, strict=True)
            ]
    return documents


def cut_dataset(
    dataset: Dataset, *, max_length: int | None, overflow: str, name: str, as_padded: bool = False
) -> tuple[Dataset, PackingReport]:
    """A dataset without documents that are too long or untrained, and the account of what was lost.

    Rows that were packed before (`seq_lengths`) are taken as they are. `as_padded` as [`plan_overflow`] takes it.
    """
    tokens = read_tokens(dataset)
    limit = None if ROW_LENGTHS in dataset.column_names else max_length
    spans, report = plan_overflow(
        tokens.lengths, tokens.trained, max_length=limit, policy=overflow, as_padded=as_padded
    )
    if not report.trained_tokens:
        raise nothing_trains(len(dataset), max_length=limit, policy=overflow)
    cut = bool((spans.start > 0).any() or (spans.stop < tokens.lengths[spans.document]).any())
    if len(spans.document) != len(dataset) or cut:
        # A document that is split is selected once for each part: row i of the result is span i.
        dataset = dataset.select(spans.document)
    if cut:
        dataset = dataset.map(
            _slice,
            with_indices=True,
            fn_kwargs={"starts": spans.start, "stops": spans.stop},
            desc=f"Cutting {name} dataset to max_length ({overflow})",
        )
    return dataset, report


def _slice(example: dict[str, Any], index: int, starts: np.ndarray, stops: np.ndarray) -> dict[str, Any]:
    span = slice(starts[index], stops[index])
    return {column: example[column][span] for column in ("input_ids", "labels") if column in example}


def cut_stream(
    dataset: IterableDataset, *, max_length: int | None, overflow: str, as_padded: bool = False
) -> IterableDataset:
    """The same for a stream, some documents at a time; `overflow=WRAP` cuts nothing, the packer does.

    Documents carry what was lost beside them in the column `LOSSES`: documents truncated, split, dropped, tokens lost.
    """
    options: dict[str, Any] = (
        {"max_length": None, "overflow": "truncate"}
        if overflow == WRAP
        else {"max_length": max_length, "overflow": overflow}
    )
    options["as_padded"] = as_padded
    # A stream may not know its columns before its first example. All are removed, as parts are other rows than
    # documents.
    columns = list(next(iter(dataset), {}))
    return dataset.map(_cut_some, batched=True, batch_size=_CUT_TOGETHER, remove_columns=columns, fn_kwargs=options)


def _cut_some(
    documents: dict[str, list[Any]], max_length: int | None, overflow: str, as_padded: bool
) -> dict[str, list]:
    labels = documents.get("labels", documents["input_ids"])
    lengths = np.array([len(ids) for ids in documents["input_ids"]], dtype=np.int64)
    trained = np.concatenate([np.asarray(document, dtype=np.int64) for document in labels]) != -100
    limit = None if ROW_LENGTHS in documents else max_length
    try:
        spans, report = plan_overflow(lengths, trained, max_length=limit, policy=overflow, as_padded=as_padded)
    except InvalidDataset:
        if overflow == "error" and limit is not None and (lengths > limit).any():
            raise
        # So many documents without a trainable one are no error in a stream: the next may be. What was dropped travels
        # with a document that is kept, and here none is.
        logger.warning("trl-packfa: %d documents of the stream train no token and were dropped.", len(lengths))
        return {column: [] for column in (*documents, "labels", LOSSES)}
    losses = [report.truncated, report.split, report.dropped_too_long + report.dropped_untrained, report.tokens_lost]
    kept = {column: [values[i] for i in spans.document] for column, values in documents.items()}
    return {
        **kept,
        "input_ids": _parts(documents["input_ids"], spans),
        "labels": _parts(labels, spans),
        # The losses of all documents of this call on the first that is kept: they are summed up, wherever it goes.
        LOSSES: [losses] + [[0] * len(losses)] * (len(spans.document) - 1),
    }


def _parts(column: list[list[int]], spans: Spans) -> list[list[int]]:
    return [column[i][start:stop] for i, start, stop in zip(*spans, strict=True)]


def prepares(args: PackedSFTConfig) -> bool:
    """Whether TRL tokenizes and labels datasets, rather than taking them as they are."""
    kwargs: Any = args.dataset_kwargs or {}
    return not kwargs.get("skip_prepare_dataset", False)


def require_usable(dataset: Dataset | IterableDataset, *, name: str, args: PackedSFTConfig, formatted: bool) -> None:
    """Refuse a dataset that is empty, or whose first example no TRL format describes, before anything is tokenized.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            As the user passed it.
        name (`str`):
            What to call it.
        args ([`PackedSFTConfig`]):
            Says which column holds plain text, and whether only what an assistant says is trained.
        formatted (`bool`):
            Whether the user's own function makes text of its examples.

    Raises:
        [`InvalidDataset`]: naming the column, its type and what it should be.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise InvalidDataset(
            f"{name}_dataset must be a `Dataset` or `IterableDataset`, not {type(dataset).__name__}.",
            do="Name one of its splits." if isinstance(dataset, dict) else "",
        )
    example = next(iter(dataset), None)
    if example is None:
        raise InvalidDataset(f"the {name} dataset is empty.", do="Check the split, filters and file names.")
    for column in _LISTS_OF_MESSAGES:
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
    if formatted or not (args.packing or prepares(args)):  # else the data collator knows what to make of it
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
        return "Pairs train with --trainer dpo or reward: PackedDPOTrainer, PackedRewardTrainer."
    made = columns_advice(suggested_columns(example))
    return made or "Rename the columns, set dataset_text_field, or pass formatting_func."


# Columns that hold messages, where they hold lists.
_LISTS_OF_MESSAGES = ("messages", "conversations", "prompt", "completion")


def hold_out(dataset: Any, size: float, *, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset into training and evaluation documents.

    Args:
        dataset (`Dataset`):
            Whole.
        size (`float`):
            Share of the documents that are evaluated, or from 1 on their number.
        seed (`int`):
            Of the draw: the same documents for a run that is resumed, and on every rank.

    Raises:
        [`InvalidDataset`]: for a stream.
        [`InvalidConfig`]: for a size that leaves one of them empty.
    """
    if not isinstance(dataset, Dataset):
        raise InvalidDataset(
            f"test_split_size={size} cannot split a stream.", do="Name a split that is there with dataset_test_split."
        )
    try:
        parts = dataset.train_test_split(int(size) if size >= 1 else size, seed=seed)
    except ValueError as error:
        raise InvalidConfig(
            f"test_split_size={size} cannot split {len(dataset)} documents.", why=[str(error)], do="Choose another."
        ) from error
    return parts["train"], parts["test"]


def _names(types: type | tuple[type, ...]) -> str:
    return " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
