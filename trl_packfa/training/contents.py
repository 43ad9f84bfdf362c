"""What documents hold, before anything is done with them: no `None`, whole numbers, numbers that the model knows.

Datasets are read once, column by column, out of Arrow; streams document by document as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from ..collator import ROW_LENGTHS
from ..errors import InvalidDataset

# Columns of tokenized documents: one whole number for each token.
TOKENS = ("input_ids", "labels")
_IGNORED = -100


class Measures(NamedTuple):
    """Of each document's numbers in one column, int64 `(S,)`: how many, how many of them are `None`, the lowest, the
    highest, of labels without -100 (0 where there is none); `length` is -1 for a document that is `None` itself."""

    length: np.ndarray
    holes: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


def measure(dataset: Dataset, column: str) -> Measures:
    """Read a column of lists; `datasets` keeps the result beside the dataset, under its contents' fingerprint."""
    counted = dataset.select_columns([column]).with_format("arrow")
    counted = counted.map(
        _measure,
        batched=True,
        batch_size=10_000,
        remove_columns=[column],
        fn_kwargs={"column": column},
        desc=f"Looking at {column}",
    )
    parts = {name: [np.zeros(0, dtype=np.int64)] for name in Measures._fields}
    for table in counted.with_format("arrow").iter(batch_size=10_000):
        for name, found in parts.items():
            found.append(table[name].to_numpy())  # type: ignore[index]  # a table, which `datasets` does not say
    return Measures(*(np.concatenate(found) for found in parts.values()))


def _measure(table: Any, column: str) -> Any:
    # One array in the place of chunks, for numpy.
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
        # What does not count is the largest number here and the smallest below, which leaves both reductions alone.
        "lowest": _by_document(np.minimum, np.where(counts, numbers, np.iinfo(np.int64).max), sizes),
        "highest": _by_document(np.maximum, np.where(counts, numbers, np.iinfo(np.int64).min), sizes),
    }
    none = _by_document(np.add, counts.astype(np.int64), sizes) == 0
    found["lowest"][none] = found["highest"][none] = 0
    return pa.table(found)


def _by_document(reduce: np.ufunc, flat: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A reduction of each document's part of `flat`; 0 for empty ones."""
    result = np.zeros(len(sizes), dtype=np.int64)
    # Sizes [2, 0, 3] begin at [0, 2, 2]. For an empty part `reduceat` would return the element that it begins at.
    filled = sizes > 0
    if filled.any():
        result[filled] = reduce.reduceat(flat, (np.cumsum(sizes) - sizes)[filled])
    return result


def without_format(dataset: Any) -> Any:
    """A dataset whose examples are Python's lists, of the columns that its format (`"torch"`, say) shows; one that is
    transformed on the fly comes back as it is."""
    if isinstance(dataset, IterableDataset):
        return dataset.with_format(None)
    if not isinstance(dataset, Dataset) or dataset.format["type"] in (None, "custom"):
        return dataset
    shown = dataset.column_names if dataset.format["output_all_columns"] else dataset.format["columns"]
    return dataset.with_format(None).select_columns(list(shown))


def require_whole(dataset: Any, *, name: str, columns: tuple[str, ...]) -> Any:
    """Refuse documents that are `None` or hold `None`, and tokens that are no whole numbers; returns the dataset, of
    which a stream is looked at as it is read.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            As the user passed it.
        name (`str`):
            What to call it.
        columns (`tuple[str, ...]`):
            Columns that TRL tokenizes, where it has them.

    Raises:
        [`InvalidDataset`]: naming the document, the column and what it holds.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(_looked_at, with_indices=True, fn_kwargs={"name": name, "columns": columns})
    for column in columns:
        # Arrow keeps the count of nulls: a column without any is not read.
        if column in dataset.column_names and dataset.data.column(column).null_count:
            for number, missing in enumerate(_missing(dataset, column)):
                if missing:
                    _refuse(name, number, column, "is None")
    lengths: np.ndarray | None = None
    for column in TOKENS:
        if column in dataset.column_names:
            lengths = _require_tokens(dataset, name, column, lengths)
    if lengths is not None and ROW_LENGTHS in dataset.column_names:
        _require_row_lengths(dataset, name, lengths)
    return dataset


def _missing(dataset: Dataset, column: str) -> Iterator[bool]:
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        yield from table[column].is_null().to_pylist()  # type: ignore[index]  # a table


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


def _require_row_lengths(dataset: Dataset, name: str, tokens: np.ndarray) -> None:
    """Refuse rows that were packed before, of `tokens` each, whose documents' lengths do not make them."""
    start = 0
    for table in dataset.select_columns([ROW_LENGTHS]).with_format("arrow").iter(batch_size=10_000):
        for number, lengths in enumerate(table[ROW_LENGTHS].to_pylist(), start=start):  # type: ignore[index]  # a table
            _require_sum(lengths, int(tokens[number]), name, number)
        start += table.num_rows  # type: ignore[attr-defined]  # a table


def _require_sum(lengths: Any, tokens: int, name: str, number: int) -> None:
    if not isinstance(lengths, list) or not all(type(length) is int and length > 0 for length in lengths):
        _refuse(name, number, ROW_LENGTHS, f"is {lengths!r}, no list of the lengths of documents")
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
            _refuse(name, index, column, f"holds {tokens[0]!r}, which is no whole number")
        if len(tokens) != len(example["input_ids"]):
            _refuse(name, index, column, f"has {len(tokens)} tokens, its input_ids {len(example['input_ids'])}")
    if "input_ids" in example and ROW_LENGTHS in example:
        _require_sum(example[ROW_LENGTHS], len(example["input_ids"]), name, index)
    return {}


def _refuse(name: str, number: int, column: str, what: str) -> NoReturn:
    raise InvalidDataset(
        f"document {number} of the {name} dataset: '{column}' {what}.", do="Mend the document, or filter it out."
    )


def require_known(dataset: Dataset, *, name: str, ids: int, labels: int) -> None:
    """Refuse numbers of tokens that a model does not have: an index error on a CPU, the end of the process's device on
    CUDA.

    Args:
        dataset (`Dataset`):
            Tokenized.
        name (`str`):
            What to call it.
        ids (`int`):
            How many tokens the model reads.
        labels (`int`):
            How many it predicts.

    Raises:
        [`InvalidDataset`]: naming the document and the number.
    """
    for column, known in (("input_ids", ids), ("labels", labels)):
        if column not in dataset.column_names:
            continue
        measures = measure(dataset, column)
        for wrong, values in ((measures.lowest < 0, measures.lowest), (measures.highest >= known, measures.highest)):
            if wrong.any():
                number = int(wrong.argmax())
                raise InvalidDataset(
                    f"document {number} of the {name} dataset: '{column}' holds {values[number]}.",
                    why=[
                        f"the model has the tokens 0 to {known - 1}" + (", -100 is none" if column == "labels" else "")
                    ],
                    do="Use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)).",
                )
