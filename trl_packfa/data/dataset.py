"""Functions that read lengths and labels from `datasets` for the packers, and cut documents to the packers' spans.

They expect tokenized datasets with a column `input_ids` and, optionally, `labels` and `seq_lengths`. Rows whose
documents share prefixes are split where they hold too many tokens.

Shape letters: S documents.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from accelerate.logging import get_logger
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from ..errors import InvalidConfig, InvalidDataset
from ..layout.prefix_tree import PrefixTree
from ..packing import WRAP, PackingReport, Spans, TrainedTokens, nothing_trains, plan_overflow
from .collator import LOSSES, ROW_LENGTHS, SAVED

logger = logging.getLogger(__name__)

# The logger of what packing does to each dataset. Code that shows these counts in another way switches it off.
COUNTS = "trl_packfa.counts"
# Numbers of documents of which one call counts the tokens, and of a stream's documents that one call cuts.
_COUNTED, _CUT_TOGETHER = 10_000, 100


AnyDataset = Dataset | IterableDataset
EvalDataset = AnyDataset | DatasetDict | IterableDatasetDict | dict[str, AnyDataset]

# Columns of TRL's formats that it tokenizes.
TEXT_COLUMNS = ("messages", "conversations", "prompt", "completion")


class Tokens(NamedTuple):
    """The number of tokens of each document, int64 `(S,)`, and which tokens have a label."""

    lengths: np.ndarray
    trained: TrainedTokens


def read_tokens(dataset: Dataset) -> Tokens:
    """Read the lengths and label masks of a tokenized dataset from Arrow, without Python lists."""
    labels = "labels" if "labels" in dataset.column_names else "input_ids"
    rows = [ROW_LENGTHS] if ROW_LENGTHS in dataset.column_names else []
    masks = (_trained(table, labels) for table in tables(dataset, labels, *rows))
    return Tokens(read_lengths(dataset).astype(np.int64), TrainedTokens.from_masks(masks))


def read_lengths(dataset: Dataset, column: str = "input_ids") -> np.ndarray:
    """Count the tokens of each document of a tokenized dataset, int32, shape `(S,)`, read-only. Labels are not read.

    Of a row whose documents share prefixes ([`SAVED`]), these are the tokens that are computed.

    `datasets` caches the counts by the fingerprint of the dataset's contents. The array is that file, mapped, so the
    processes of a machine hold one copy of it. It has 32 bits: widen what is multiplied.
    """
    if not len(dataset):
        return np.zeros(0, dtype=np.int32)
    columns = [column, SAVED] if column == "input_ids" and SAVED in dataset.column_names else [column]
    options: dict[str, Any] = {"batched": True, "writer_batch_size": len(dataset), "desc": "Counting tokens"}
    counted = dataset.select_columns(columns).with_format("arrow")
    counted = counted.map(_count, batch_size=_COUNTED, remove_columns=columns, fn_kwargs={"column": column}, **options)
    if len(dataset) > _COUNTED:  # as one part, which numpy maps without a copy
        counted = counted.map(batch_size=None, **options)
    return next(tables(counted, "length", batch_size=len(dataset)))["length"].chunk(0).to_numpy()


def read_sizes(dataset: Dataset, lengths: np.ndarray) -> np.ndarray:
    """Count all tokens of each document, from those that are computed, `lengths` ([`read_lengths`]); int64 `(S,)`."""
    saved = [table[SAVED].to_numpy() for table in tables(dataset, SAVED)] if SAVED in dataset.column_names else []
    return lengths + np.concatenate(saved) if saved else lengths


def count_parts(dataset: Dataset, lengths: np.ndarray, budget: int) -> dict[int, list[tuple[int, int]]]:
    """Return, by row, the computed and all tokens of each part of a row that [`split_example`] splits."""
    rows = np.flatnonzero(lengths > budget).tolist() if SAVED in dataset.column_names else []
    return {row: [(count_computed(part), len(part["input_ids"])) for part in split_example(dataset[row], budget)]
            for row in rows}  # fmt: skip


def longest_document(dataset: AnyDataset) -> tuple[int, str] | None:
    """Return tokens and description of the longest document in rows that may be split; `None` for other datasets."""
    if isinstance(dataset, IterableDataset) or SAVED not in dataset.column_names:
        return None
    longest = max(int(_flat(table[ROW_LENGTHS]).max()) for table in tables(dataset, ROW_LENGTHS))
    return longest, f"the longest turn with its history, which has {longest} tokens"


def count_computed(example: dict[str, Any]) -> int:
    """Count the tokens of an example that are computed: all but those of a prefix that it holds several times."""
    return len(example["input_ids"]) - example.get(SAVED, 0)


def count_trained(dataset: Dataset) -> int:
    """Count the tokens of a tokenized dataset that have a label."""
    return sum(int((_flat(table["labels"]) != -100).sum()) for table in tables(dataset, "labels"))


def _count(table: Any, column: str) -> Any:
    lengths = pc.call_function("list_value_length", [table[column]])
    if SAVED in table.column_names:
        lengths = pc.call_function("subtract", [lengths, table[SAVED]])
    return pa.table({"length": lengths.cast(pa.int32())})


def _trained(table: Any, labels: str) -> np.ndarray:
    """Return a mask over the concatenated documents of a table: which tokens have a label.

    In a row that was packed before, a document's first token counts as without label.
    """
    mask = _flat(table[labels]) != -100
    if ROW_LENGTHS in table.column_names:
        lengths = _flat(table[ROW_LENGTHS])
        mask[np.cumsum(lengths) - lengths] = False
    return mask


def tables(dataset: Dataset, *columns: str, batch_size: int = 10_000) -> Iterator[Any]:
    """Yield some columns as `pyarrow.Table`s, a type that `datasets` does not declare."""
    return dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=batch_size)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    # `flatten`, not `values`: for a slice, `values` also holds the elements outside of it.
    return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])


def without_our_columns(dataset: AnyDataset) -> AnyDataset:
    """Drop a user's columns whose names have a meaning here. `ROW_LENGTHS` stays in a tokenized dataset."""
    columns = dataset.column_names or list(next(iter(dataset), {}))
    ours = {LOSSES, SAVED} if "input_ids" in columns else {LOSSES, SAVED, ROW_LENGTHS}
    found = [name for name in columns if name in ours]
    return dataset.remove_columns(found) if found else dataset


def named_datasets(train: AnyDataset | None, evaluation: EvalDataset | None) -> list[tuple[str, AnyDataset]]:
    """List every dataset that was given, with the name that TRL gives it."""
    evaluations: Any = evaluation if isinstance(evaluation, dict) else {"eval": evaluation}
    return [(name, d) for name, d in {"train": train, **evaluations}.items() if d is not None]


def without_format(dataset: Any) -> Any:
    """Return a dataset without its format and the columns that it hides: its examples are plain Python lists."""
    if isinstance(dataset, IterableDataset):
        return dataset.with_format(None)
    if not isinstance(dataset, Dataset) or dataset.format["type"] in (None, "custom"):
        return dataset
    shown = dataset.column_names if dataset.format["output_all_columns"] else dataset.format["columns"]
    return dataset.with_format(None).select_columns(list(shown))


def take_apart(dataset: AnyDataset, *, name: str) -> AnyDataset:
    """Split rows that were packed before (`seq_lengths`) into their documents; other columns are repeated for each."""
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if ROW_LENGTHS not in columns:
        return dataset
    gone = [name for name in (ROW_LENGTHS, SAVED) if name in columns]
    options: dict[str, Any] = {"batched": True, "batch_size": _CUT_TOGETHER, "remove_columns": gone}
    if isinstance(dataset, IterableDataset):
        return dataset.map(_documents, **options)
    return dataset.map(_documents, desc=f"Taking rows of the {name} dataset apart", **options)


def _documents(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    documents: dict[str, list[Any]] = {column: [] for column in rows if column not in (ROW_LENGTHS, SAVED)}
    for i, lengths in enumerate(rows[ROW_LENGTHS]):
        # Lengths [2, 3] of a row of 5 tokens give stops [2, 5].
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
    """Cut or drop documents that are too long, drop those without a trained token, and count what was dropped.

    Rows that were packed before (`seq_lengths`) are not cut. See [`plan_overflow`] for `as_padded`.
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
        # A split document is selected once for each part, so that row i of the result is span i.
        dataset = dataset.select(spans.document)
    if cut:
        options: dict[str, Any] = {"fn_kwargs": {"starts": spans.start, "stops": spans.stop}, "with_indices": True}
        dataset = dataset.map(_slice, desc=f"Cutting {name} dataset to max_length ({overflow})", **options)
    return dataset, report


def _slice(example: dict[str, Any], index: int, starts: np.ndarray, stops: np.ndarray) -> dict[str, Any]:
    span = slice(starts[index], stops[index])
    return {column: example[column][span] for column in ("input_ids", "labels") if column in example}


def cut_stream(
    dataset: IterableDataset, *, max_length: int | None, overflow: str, as_padded: bool = False
) -> IterableDataset:
    """Cut the documents of a stream to `max_length`, some at a time. With `overflow=WRAP` the packer cuts them later.

    Each document gets a column `LOSSES`: the numbers of documents truncated, split and dropped, and of tokens lost.
    """
    if overflow == WRAP:
        max_length, overflow = None, "truncate"
    options = {"max_length": max_length, "overflow": overflow, "as_padded": as_padded}
    # A stream may not know its columns before its first example. All are removed, because the result has other rows.
    columns = list(next(iter(dataset), {}))
    return dataset.map(cut_some, batched=True, batch_size=_CUT_TOGETHER, remove_columns=columns, fn_kwargs=options)


def cut_some(
    documents: dict[str, list[Any]], max_length: int | None, overflow: str, as_padded: bool
) -> dict[str, list]:
    """Cut some documents of a stream, see [`cut_stream`]."""
    labels = documents.get("labels", documents["input_ids"])
    lengths = np.array([len(ids) for ids in documents["input_ids"]], dtype=np.int64)
    trained = np.concatenate([np.asarray(document, dtype=np.int64) for document in labels]) != -100
    limit = None if ROW_LENGTHS in documents else max_length
    try:
        spans, report = plan_overflow(lengths, trained, max_length=limit, policy=overflow, as_padded=as_padded)
    except InvalidDataset:
        if overflow == "error" and limit is not None and (lengths > limit).any():
            raise
        # In a stream, a batch without a trainable document is no error, because the next one may have some. A kept
        # document carries the counts of dropped ones, and here none is kept.
        logger.warning("trl-packfa: %d documents of the stream train no token and were dropped.", len(lengths))
        return {column: [] for column in (*documents, "labels", LOSSES)}
    losses = [report.truncated, report.split, report.dropped_too_long + report.dropped_untrained, report.tokens_lost]
    kept = {column: [values[i] for i in spans.document] for column, values in documents.items()}
    return {
        **kept,
        "input_ids": _parts(documents["input_ids"], spans),
        "labels": _parts(labels, spans),
        # The first kept document carries the counts of this whole call. They are summed later, so its place does not
        # matter.
        LOSSES: [losses] + [[0] * len(losses)] * (len(spans.document) - 1),
    }


def _parts(column: list[list[int]], spans: Spans) -> list[list[int]]:
    return [column[i][start:stop] for i, start, stop in zip(*spans, strict=True)]


def hold_out(dataset: Any, size: float, *, seed: int) -> tuple[Dataset, Dataset]:
    """Split documents off for evaluation, a share (below 1) or a number, the same on every rank and when resumed."""
    if not isinstance(dataset, Dataset):
        raise InvalidDataset(
            f"test_split_size={size} cannot split a stream.", do="Name an existing split with dataset_test_split."
        )
    try:
        parts = dataset.train_test_split(int(size) if size >= 1 else size, seed=seed)
    except ValueError as error:
        raise InvalidConfig(
            f"test_split_size={size} cannot split {len(dataset)} documents.", why=[str(error)], do="Change the size."
        ) from error
    return parts["train"], parts["test"]


def tell_counts(report: PackingReport, name: str) -> None:
    """Log the counts of a dataset's documents and tokens: kept, cut and dropped."""
    counts = ", ".join(f"{label} {value}" for label, value in report.lines())
    # Users who show only warnings must learn of dropped tokens.
    level = logging.WARNING if report.tokens_lost else logging.INFO
    get_logger(COUNTS).log(level, "trl-packfa: %s: %s", name, counts)


def split_tree(documents: Sequence[Sequence[int]], limit: int | None) -> list[tuple[list[int], PrefixTree]]:
    """Split documents that share prefixes into rows of neighbours with at most `limit` computed tokens.

    A document that is longer by itself is a row of its own. Returns for each row the numbers of its documents, and
    their tree: the prefixes that they need.
    """
    arrays = [np.asarray(document) for document in documents]
    whole = PrefixTree.of(arrays)
    if limit is None or whole.num_tokens <= limit:
        return [(list(range(len(arrays))), whole)]
    rows: list[tuple[list[int], PrefixTree]] = []
    for i in range(len(arrays)):
        if rows:
            together = [*rows[-1][0], i]
            tree = PrefixTree.of([arrays[j] for j in together])
            if tree.num_tokens <= limit:
                rows[-1] = together, tree
                continue
        rows.append(([i], PrefixTree.of([arrays[i]])))
    return rows


def split_example(example: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    """Split an example of several documents ([`SAVED`]) that has more computed tokens than a micro-batch may have."""
    if SAVED not in example or count_computed(example) <= budget:
        return [example]
    stops = list(itertools.accumulate(example[ROW_LENGTHS], initial=0))
    documents = {
        column: [example[column][start:stop] for start, stop in itertools.pairwise(stops)]
        for column in ("input_ids", "labels")
    }
    parts = []
    for numbers, tree in split_tree(documents["input_ids"], budget):
        joined = {
            column: list(itertools.chain.from_iterable(values[i] for i in numbers))
            for column, values in documents.items()
        }
        parts.append({**example, **joined, **tree_columns(tree, [example[ROW_LENGTHS][i] for i in numbers])})
    for part in parts[1:]:
        part.pop(LOSSES, None)  # the counts of a stream's losses, which the first part keeps
    return parts


def tree_columns(tree: PrefixTree, lengths: list[int]) -> dict[str, Any]:
    """Return the columns that describe a row of documents: their lengths, and the tokens that are not computed."""
    return {ROW_LENGTHS: lengths, SAVED: tree.saved}
