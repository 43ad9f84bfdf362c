"""Checks of what datasets hold: their values before TRL tokenizes them, and the token ids that the model has.

A dataset is read once, column by column, from Arrow. A stream is checked document by document as it is read. Columns
of other formats, such as Alpaca's, can be made into TRL's.

Shape letters: S documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from ..config.sft import PackedSFTConfig
from ..errors import InvalidConfig, InvalidDataset
from .collator import ROW_LENGTHS
from .dataset import TEXT_COLUMNS, AnyDataset, EvalDataset, tables, without_format


def usable(
    train: AnyDataset | None, evaluation: EvalDataset | None, args: PackedSFTConfig, *, formatted: bool
) -> dict[str, Any]:
    """Return the trainer's datasets, as plain Python values and with their contents checked if they are packed."""
    columns = () if formatted else (*TEXT_COLUMNS, args.dataset_text_field)

    def look(name: str, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            return {key: look(key, one) for key, one in dataset.items()}
        packs = args.packing and dataset is not None
        return require_whole(without_format(dataset), name=name, columns=columns) if packs else dataset

    return {"train_dataset": look("train", train), "eval_dataset": look("eval", evaluation)}


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


# Columns of tokenized documents, with one whole number for each token.
TOKENS = ("input_ids", "labels")
_IGNORED = -100


class Measures(NamedTuple):
    """Measurements of one column's documents, each field int64 `(S,)`."""

    length: np.ndarray  # how many numbers a document has; -1 for a document that is `None` itself
    holes: np.ndarray  # how many of them are `None`
    lowest: np.ndarray  # of its numbers, of labels without -100; 0 if there are none
    highest: np.ndarray  # the same


def measure(dataset: Dataset, column: str) -> Measures:
    """Measure a column of lists. `datasets` caches the result by the fingerprint of the dataset's contents."""
    counted = dataset.select_columns([column]).with_format("arrow")
    options: dict[str, Any] = {"batched": True, "batch_size": 10_000, "remove_columns": [column]}
    counted = counted.map(_measure, fn_kwargs={"column": column}, desc=f"Looking at {column}", **options)
    parts = {name: [np.zeros(0, dtype=np.int64)] for name in Measures._fields}
    for table in tables(counted, *parts):
        for name, found in parts.items():
            found.append(table[name].to_numpy())
    return Measures(*(np.concatenate(found) for found in parts.values()))


def _measure(table: Any, column: str) -> Any:
    # numpy needs one array instead of chunks.
    lists = table[column].combine_chunks()
    length = pc.call_function("list_value_length", [lists]).cast(pa.int64())
    sizes = length.fill_null(0).to_numpy(zero_copy_only=False)
    flat = pc.call_function("list_flatten", [lists])
    holes = flat.is_null().to_numpy(zero_copy_only=False)
    numbers = flat.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    counts = ~holes & (numbers != _IGNORED) if column == "labels" else ~holes
    found = {
        "length": length.fill_null(-1).to_numpy(zero_copy_only=False),
        "holes": _by_document(np.add, holes.astype(np.int64), sizes),
        # A number that does not count is replaced by the largest int64 here and the smallest below. So it changes
        # neither the minimum nor the maximum.
        "lowest": _by_document(np.minimum, np.where(counts, numbers, np.iinfo(np.int64).max), sizes),
        "highest": _by_document(np.maximum, np.where(counts, numbers, np.iinfo(np.int64).min), sizes),
    }
    none = _by_document(np.add, counts.astype(np.int64), sizes) == 0
    found["lowest"][none] = found["highest"][none] = 0
    return pa.table(found)


def _by_document(reduce: np.ufunc, flat: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Reduce each document's part of `flat` to one number; 0 for empty documents."""
    result = np.zeros(len(sizes), dtype=np.int64)
    # Sizes [2, 0, 3] begin at [0, 2, 2]. For an empty part `reduceat` would return the element at its beginning.
    filled = sizes > 0
    if filled.any():
        result[filled] = reduce.reduceat(flat, (np.cumsum(sizes) - sizes)[filled])
    return result


def require_whole(dataset: Any, *, name: str, columns: tuple[str, ...]) -> Any:
    """Refuse documents that are `None` or hold `None`, and tokens that are no whole numbers; return the dataset.

    A stream is returned with the check added, which runs as it is read. `columns` are those that TRL tokenizes.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(_looked_at, with_indices=True, fn_kwargs={"name": name, "columns": columns})
    for column in columns:
        # Arrow stores the number of nulls, so a column without nulls need not be read.
        if column in dataset.column_names and dataset.data.column(column).null_count:
            missing = (none for table in tables(dataset, column) for none in table[column].is_null().to_pylist())
            for number, is_none in enumerate(missing):  # a selection may leave the nulls out
                if is_none:
                    _refuse(name, number, column, "is None")
    lengths: np.ndarray | None = None
    for column in TOKENS:
        if column in dataset.column_names:
            lengths = _require_tokens(dataset, name, column, lengths)
    if lengths is not None and ROW_LENGTHS in dataset.column_names:
        rows = (of_row for table in tables(dataset, ROW_LENGTHS) for of_row in table[ROW_LENGTHS].to_pylist())
        for number, of_row in enumerate(rows):
            _require_sum(of_row, int(lengths[number]), name, number)
    return dataset


def _require_tokens(dataset: Dataset, name: str, column: str, lengths: np.ndarray | None) -> np.ndarray:
    kind = dataset.data.schema.field(column).type
    inner = getattr(kind, "value_type", None)
    if inner is None or not pa.types.is_integer(inner):
        held = "lists" if inner is not None and pa.types.is_nested(inner) else str(inner or kind)
        raise InvalidDataset(
            f"column '{column}' of the {name} dataset holds {held}, not lists of whole numbers.",
            do="Convert the column, or leave tokenizing to the trainer.",
        )
    measures = measure(dataset, column)
    for wrong, what in ((measures.length < 0, "is None"), (measures.holes > 0, "holds None among its tokens")):
        if wrong.any():
            _refuse(name, int(wrong.argmax()), column, what)
    if lengths is not None and (measures.length != lengths).any():
        number = int((measures.length != lengths).argmax())
        _refuse(name, number, column, f"has {measures.length[number]} tokens, its input_ids {lengths[number]}")
    return measures.length


def _require_sum(lengths: Any, tokens: int, name: str, number: int) -> None:
    """Refuse a row that was packed before if the lengths of its documents do not sum up to its `tokens`."""
    if not isinstance(lengths, list) or not all(type(length) is int and length > 0 for length in lengths):
        _refuse(name, number, ROW_LENGTHS, f"is {lengths!r}, not a list of document lengths")
    if sum(lengths) != tokens:
        _refuse(name, number, ROW_LENGTHS, f"sums up to {sum(lengths)} tokens, its input_ids have {tokens}")


def _looked_at(example: dict[str, Any], index: int, name: str, columns: tuple[str, ...]) -> dict[str, Any]:
    for column in (*columns, *TOKENS):
        if column not in example:
            continue
        tokens = example[column]
        if tokens is None:
            _refuse(name, index, column, "is None")
        if column not in TOKENS or not len(tokens):
            continue
        if any(token is None for token in tokens):
            _refuse(name, index, column, "holds None among its tokens")
        numbers = np.asarray(tokens)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            _refuse(name, index, column, f"holds {tokens[0]!r}, which is not a whole number")
        if len(tokens) != len(example["input_ids"]):
            _refuse(name, index, column, f"has {len(tokens)} tokens, its input_ids {len(example['input_ids'])}")
    if "input_ids" in example and ROW_LENGTHS in example:
        _require_sum(example[ROW_LENGTHS], len(example["input_ids"]), name, index)
    return {}


def _refuse(name: str, number: int, column: str, what: str) -> NoReturn:
    raise InvalidDataset(
        f"document {number} of the {name} dataset: '{column}' {what}.", do="Fix the document, or filter it out."
    )


def require_known(dataset: Dataset, *, name: str, ids: int, labels: int) -> None:
    """Refuse token ids that a model does not have. It reads `ids` tokens, and predicts `labels` of them.

    On a CPU such an id would raise an index error; on CUDA the process could not use its device any more.
    """
    for column, known in (("input_ids", ids), ("labels", labels)):
        if column not in dataset.column_names:
            continue
        measures, no_label = measure(dataset, column), ", and -100 means no label" if column == "labels" else ""
        for wrong, values in ((measures.lowest < 0, measures.lowest), (measures.highest >= known, measures.highest)):
            if wrong.any():
                number = int(wrong.argmax())
                raise InvalidDataset(
                    f"document {number} of the {name} dataset: '{column}' holds {values[number]}.",
                    why=[f"the model has the tokens 0 to {known - 1}" + no_label],
                    do="Use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)).",
                )
