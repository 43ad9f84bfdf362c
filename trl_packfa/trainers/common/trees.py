"""Rows of a dataset whose documents share prefixes: split one where it holds too many tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...collator import LOSSES, ROW_LENGTHS, SAVED
from ...layout.prefix_tree import PrefixTree
from .dataset import count_computed


def split_tree(documents: Sequence[Sequence[int]], limit: int | None) -> list[tuple[list[int], PrefixTree]]:
    """Split documents that share prefixes into rows of neighbours with at most `limit` computed tokens.

    Each row holds the prefixes that its documents need. A document that is longer by itself is a row of its own.

    Returns:
        For each row the numbers of its documents, and their tree.
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
