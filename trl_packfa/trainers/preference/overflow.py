"""Cutting of preference pairs to `max_length`, with every dropped token counted.

Shape letters: P pairs (or single examples, for a trainer of those), R rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from ...errors import InvalidDataset
from ...packing import PackingReport
from ..common.dataset import read_lengths

# A trainer's rows of a pair. Each row is a tuple of columns whose token ids make it: a prompt, if there is one, then
# the answer.
Rows = tuple[tuple[str, ...], ...]


def row_lengths(dataset: Dataset, rows: Rows) -> np.ndarray:
    """Count the tokens of every row of every pair of a tokenized dataset, int64, shape `(P, R)`."""
    lengths = _column_lengths(dataset, rows)
    return np.stack([np.sum([lengths[column] for column in row], axis=0) for row in rows], axis=1)


def _column_lengths(dataset: Dataset, rows: Rows) -> dict[str, np.ndarray]:
    return {column: read_lengths(dataset, column) for column in dict.fromkeys(c for row in rows for c in row)}


@dataclass(frozen=True)
class PairReport(PackingReport):
    """The packing report of pairs or single examples, which have `rows_each` rows. Its documents are their rows."""

    rows_each: int = 1

    def lines(self) -> list[tuple[str, str]]:
        """List label and value of each count: pairs first, then their rows."""
        row = "row" if self.rows_each > 1 else "example"
        counts = [(label.replace("document", row), n) for label, n in super().lines() if label != "rows each"]
        return [("pairs", f"{self.documents // self.rows_each:,}"), *counts] if self.rows_each > 1 else counts


def plan_pairs(
    dataset: Dataset, rows: Rows, *, max_length: int | None, policy: str, name: str
) -> tuple[np.ndarray, PairReport]:
    """Return the int64 indices of the pairs to train on, and the report, which also counts the others.

    The dataset is tokenized and not cut. Policy `"truncate"`: answers are cut, and pairs whose prompt fills a row are
    dropped, as in TRL. `"drop"`: pairs with a row that is too long are dropped. `"error"`: they are refused.

    Raises:
        [`InvalidDataset`]: with policy `"error"`, with the first pair that is too long; also if no pair is left.
    """
    columns = _column_lengths(dataset, rows)
    answer = np.stack([columns[row[-1]] for row in rows], axis=1)
    prompt = np.stack([columns[row[0]] if len(row) > 1 else np.zeros_like(answer[:, 0]) for row in rows], axis=1)
    lengths = prompt + answer
    limit = int(lengths.max(initial=1)) if max_length is None else max_length
    too_long = lengths > limit
    if policy == "error" and too_long.any():
        first = int(np.flatnonzero(too_long.any(axis=1))[0])
        raise InvalidDataset(
            f"{name} example {first} has a row of {lengths[first].max()} tokens, max_length is {limit} "
            "(overflow='error').",
            why=[f"{int(too_long.any(axis=1).sum())} of {len(lengths)} examples are too long"],
            do="Raise max_length, or choose another overflow.",
        )
    # If the prompt leaves no room for an answer, there is nothing to train.
    unfit = too_long.any(axis=1) if policy == "drop" else (prompt >= limit).any(axis=1)
    kept = np.flatnonzero(~unfit)
    if not len(kept):
        raise InvalidDataset(
            f"no {name} example fits: {len(lengths)} examples, max_length={max_length}, overflow='{policy}'.",
            do="Raise max_length, or use shorter examples.",
        )
    rest = np.minimum(lengths[kept], limit)
    dropped = int(unfit.sum()) * lengths.shape[1]
    report = PairReport(
        rows_each=lengths.shape[1],
        documents=lengths.size,
        tokens=int(lengths.sum()),
        too_long=int(too_long.sum()),
        truncated=int(too_long[kept].sum()),
        split=0,
        dropped_too_long=dropped if policy == "drop" else 0,
        dropped_untrained=0 if policy == "drop" else dropped,
        tokens_lost=int(lengths.sum() - rest.sum()),
        packed_documents=rest.size,
        packed_tokens=int(rest.sum()),
        trained_tokens=int((rest - prompt[kept]).sum()),
    )
    return kept, report


def cut_answers(dataset: Dataset, rows: Rows, *, max_length: int, also: Sequence[str] = (), name: str) -> Dataset:
    """Cut the answers, those in `also` too, so that a row has at most `max_length` tokens, as TRL's collators do."""
    answers = [*(row[-1] for row in rows), *also]
    prompt = next((row[0] for row in rows if len(row) > 1), None)

    def cut(example: dict[str, Any]) -> dict[str, Any]:
        room = max_length - (len(example[prompt]) if prompt is not None else 0)
        return {answer: example[answer][:room] for answer in answers}

    return dataset.map(cut, desc=f"Cutting {name} dataset to max_length")
