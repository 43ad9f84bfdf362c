"""Cutting of pairs: to `max_length`, with every dropped token counted, and of a step's pairs into micro-batches.

A pair is never split. Each micro-batch weights its pairs as the padded run does: a micro-batch's loss is a mean over
pairs, and the step's loss is a mean over padded micro-batches and ranks.

Shape letters: P pairs (or single examples, for a trainer of those), R rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from ...data.batching import FREE
from ...data.dataset import read_lengths
from ...data.flops import quadratic_weight
from ...data.image_examples import OwnCutter, Processed
from ...data.step_cutting import TokenBudget
from ...data.steps import CutStep, Part, Plan
from ...errors import InvalidDataset
from ...packing import PackingReport, imbalance, recut_over_ranks

# Memory of a padding position as a share of a token's. The position costs one hidden state of zeros when outputs are
# padded again. A token costs a hidden state in every layer, and one layer's activations.
_PAD = 1 / 8
# Factor for the next budget to try if the padding does not fit.
_LESS = 0.8


class PairWeight(NamedTuple):
    """Weight of a micro-batch of pairs, and the lengths of its rows in the padded run."""

    widths: np.ndarray  # of the pairs' rows there, `(P,)`
    weight: float  # of the mean loss, relative to a padded micro-batch's; 0 if the rank has no pairs left


def weights_of_pairs(
    cut: Sequence[Sequence[int]], groups: np.ndarray, *, longest: np.ndarray, shortest: int
) -> list[PairWeight]:
    """Weight the micro-batches of `cut`, numbers of pairs; one without pairs runs the `shortest` untrained.

    `groups` are the number of each pair's padded micro-batch, and `longest` the length of its rows if it is padded
    alone, `(P,)`.
    """
    # All pairs of a micro-batch come from padded micro-batches of the same size.
    sizes = np.bincount(groups)[groups]
    widest = np.zeros(int(groups.max()) + 1, dtype=longest.dtype)
    np.maximum.at(widest, groups, longest)
    widths = widest[groups]
    return [PairWeight(widths[list(pairs) or [shortest]], len(pairs) / int(sizes[pairs[0]]) if pairs else 0.0)
            for pairs in cut]  # fmt: skip


class PairPlan(TokenBudget, Plan):
    """A plan of steps whose micro-batches of pairs have about equal cost, the same number of them on every rank."""

    columns = ("input_ids",)

    def __init__(self, trainer: Any, *, rows: Rows) -> None:
        args = trainer.args
        self.rank, self.world_size = args.data_parallel_rank, args.data_parallel_size
        self.multiple: int = args.pad_to_multiple_of or 1
        self.pad = 1 if args.auto_find_batch_size else _PAD  # a run that looks for what fits takes no estimate
        self.lengths, _ = row_lengths(trainer.train_dataset, rows)  # `(P, R)`, of all pairs
        # Lengths are those of pairs here. Two rows of 3 tokens have squares that add up to 18, but the square of their
        # sum is 36, so divide by the number of rows.
        self.quadratic = quadratic_weight(trainer.model) / len(rows)
        tokens = self.lengths.sum(axis=1)
        longest, widest = int(tokens.max()), len(rows) * int(self.lengths.max())
        which = f"example {tokens.argmax()}, whose rows have {longest} tokens"
        super().__init__(args, tokens, longest=longest, which=which, widest=widest, cut=FREE, why="")

    def cut(self, rows: np.ndarray) -> CutStep:
        """Cut a step of these rows, of all ranks."""
        lengths, groups = self.lengths[rows], np.arange(len(rows)) // self.batch_size
        dealt, tokens = self._deal(lengths, groups), lengths.sum(axis=1)
        longest, shortest = -(-lengths.max(axis=1) // self.multiple) * self.multiple, int(tokens.argmin())
        weights = weights_of_pairs(dealt[self.rank], groups, longest=longest, shortest=shortest)
        parts = [Part(rows[pairs or [shortest]].tolist(), weight)
                 for pairs, weight in zip(dealt[self.rank], weights, strict=True)]  # fmt: skip
        return CutStep(parts, imbalance(dealt, tokens, self.quadratic))

    def _deal(self, lengths: np.ndarray, groups: np.ndarray) -> list[list[list[int]]]:
        """Deal the pairs; return, per rank, the pairs of each of its micro-batches.

        Pairs of padded micro-batches with different sizes have different weights, so they do not share a micro-batch.
        The last padded micro-batch of an epoch may have another size.
        """
        dealt: list[list[list[int]]] = [[] for _ in range(self.world_size)]
        sizes = np.bincount(groups)[groups]
        for size in np.unique(sizes):
            members = np.flatnonzero(sizes == size)
            for rank, parts in enumerate(self._deal_alike(lengths[members], groups[members])):
                dealt[rank] += [members[part].tolist() for part in parts]
        return dealt

    def _deal_alike(self, lengths: np.ndarray, groups: np.ndarray) -> list[list[list[int]]]:
        world_size, tokens, budget = self.world_size, lengths.sum(axis=1), self.budget
        as_padded = [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]
        rounds = -(-len(as_padded) // world_size)
        as_padded += [[]] * (rounds * world_size - len(as_padded))
        while True:
            dealt = recut_over_ranks(tokens, budget=budget, world_size=world_size, quadratic=self.quadratic)
            fits = all(self._footprint(lengths[part]) <= self.budget for parts in dealt for part in parts if part)
            if self.asked is None and len(dealt[0]) > rounds:
                return [as_padded[rank::world_size] for rank in range(world_size)]
            if fits or budget == tokens.max():
                return dealt
            budget = max(int(budget * _LESS), int(tokens.max()))

    def _footprint(self, lengths: np.ndarray) -> float:
        """Return the memory of a micro-batch of rows `(P, R)`, in tokens. Padding comes back before the LM head."""
        return float(lengths.sum() + self.pad * (lengths.max() * lengths.size - lengths.sum()))


class ImagePairCutter(OwnCutter):
    """A cutter of a step's pairs with images, or of answers with images, into micro-batches of about equal cost."""

    columns = ("input_ids",)

    def cut(self, batches: Sequence[list[Processed]]) -> CutStep:
        """Cut a step, given by padded micro-batch."""
        own = self.cut_own(batches, by_size=True)
        longest = np.array([example.width for example in own.examples])
        weights = weights_of_pairs(own.parts, own.padded, longest=longest, shortest=own.shortest)
        return CutStep(list(map(own.part, own.parts, weights)), own.imbalance)


# A trainer's rows of a pair. Each row is a tuple of columns whose token ids make it: a prompt, if there is one, then
# the answer.
Rows = tuple[tuple[str, ...], ...]


def row_lengths(dataset: Dataset, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of every row of a tokenized dataset's pairs, and of its prompt; both int64 `(P, R)`."""
    # Each column is read once: the rows of a pair share their prompt.
    columns = {
        column: read_lengths(dataset, column).astype(np.int64) for column in dict.fromkeys(chain.from_iterable(rows))
    }
    lengths = np.stack([sum(columns[column] for column in row) for row in rows], axis=1)
    return lengths, lengths - np.stack([columns[row[-1]] for row in rows], axis=1)


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
    lengths, prompt = row_lengths(dataset, rows)
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


# TRL's column of mismatched answers, for a KTO loss that estimates a KL.
MISMATCHED = "KL_completion_ids"


def cut_answers(dataset: Dataset, rows: Rows, *, max_length: int, name: str) -> Dataset:
    """Cut the answers so that a row has at most `max_length` tokens, as TRL's collators do."""
    answers = [*(row[-1] for row in rows), *{MISMATCHED}.intersection(dataset.column_names)]

    def cut(example: dict[str, Any]) -> dict[str, Any]:
        room = max_length - sum(len(example[column]) for column in rows[0][:-1])
        return {answer: example[answer][:room] for answer in answers}

    return dataset.map(cut, desc=f"Cutting {name} dataset to max_length")
