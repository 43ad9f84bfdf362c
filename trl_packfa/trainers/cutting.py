"""The pairs of an optimizer step, re-cut into micro-batches that are fewer, fuller and level over ranks.

A pair is never parted. Each micro-batch weighs its pairs as the padded run weighs them: its loss is a mean over pairs,
and the step's a mean over padded micro-batches and ranks.

Shape letters: P pairs of a step, R rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from datasets import Dataset

from ..errors import InvalidConfig
from ..packing import imbalance, recut_over_ranks
from ..training.flops import quadratic_weight
from ..training.step_packing import Documents, Slot, of_all_ranks
from .overflow import Rows, row_lengths

# What a pad costs of a token's memory: a hidden state of zeros where outputs are put back, where a token costs one in
# every layer and a layer's activations besides.
_PAD = 1 / 8
# How much smaller a budget is tried where pads do not fit.
_LESS = 0.8


class Part(NamedTuple):
    """A micro-batch of a re-cut step.

    Attributes:
        pairs (`tuple[int, ...]`): which of the step's pairs it holds, in its order.
        weight (`float`): what its mean loss counts, in units of a padded micro-batch's; 0 where a rank has none.
    """

    pairs: tuple[int, ...]
    weight: float


class PairSlot(Slot):
    """What the Trainer takes for one padded micro-batch: idle, or the whole step, re-cut.

    Attributes:
        parts (`list[Part]`): of each micro-batch, what it holds.
        padded (`list[list[int]]`): the pairs of each padded micro-batch of this rank.
        examples (`Sequence[dict]`): the step's pairs, of all ranks.
        lengths (`np.ndarray`): tokens of their rows, shape `(P, R)`.
        widths (`np.ndarray`): how long the rows of a pair are in the padded run, shape `(P,)`.
    """

    def __init__(
        self,
        micro_batches: Sequence[dict[str, Any]] = (),
        imbalance: float = 1.0,
        *,
        parts: Sequence[Part] = (),
        padded: Sequence[Sequence[int]] = (),
        examples: Sequence[dict[str, Any]] = (),
        lengths: np.ndarray | None = None,
        widths: np.ndarray | None = None,
    ) -> None:
        super().__init__(micro_batches, imbalance)
        self.parts, self.padded, self.examples = list(parts), [list(pairs) for pairs in padded], examples
        self.lengths = np.zeros((0, 1), dtype=np.int64) if lengths is None else lengths
        self.widths = np.zeros(0, dtype=np.int64) if widths is None else widths


class PairCutter:
    """Cuts the pairs of a step over ranks and micro-batches, level in cost, equally many on every rank.

    Args:
        args ([`PreferenceConfig`]):
            Says the token budget: `max_tokens_per_microbatch`, or what the padded run would hold at its worst.
        rows (`Rows`):
            The columns that make the rows of a pair.
        train_dataset (`Dataset`):
            Tokenized and cut to `max_length`.
        model (`torch.nn.Module`):
            Its shape says how dear attention is beside the matrix products.
        accelerator (`Accelerator`):
            Knows the other ranks.

    Attributes:
        tokens (`np.ndarray`): of each pair of the dataset.
        budget (`int`): tokens of a micro-batch.

    Raises:
        [`InvalidConfig`]: if a pair is longer than the budget.
    """

    def __init__(self, args: Any, *, rows: Rows, train_dataset: Dataset, model: Any, accelerator: Accelerator) -> None:
        self.rows, self.accelerator = rows, accelerator
        self.multiple: int = args.pad_to_multiple_of or 1
        lengths = row_lengths(train_dataset, rows)
        self.tokens = lengths.sum(axis=1)
        self.asked: int | None = args.max_tokens_per_microbatch
        if self.asked is not None:
            _require_budget(self.asked, self.tokens)
        self.budget = self.asked or args.per_device_train_batch_size * len(rows) * int(lengths.max())
        # Of pairs, not of rows: the squares of two rows of 3 are 18, half of their sum's, 36.
        self.quadratic = quadratic_weight(model) / len(rows)

    def cut(
        self, batches: Sequence[Documents], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> list[PairSlot]:
        """One slot per padded micro-batch, all idle but the last, which holds the step's pairs re-cut."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        examples, groups = of_all_ranks(batches, self.accelerator)
        lengths = np.array(
            [[sum(len(example[column]) for column in row) for row in self.rows] for example in examples],
            dtype=np.int64,
        )
        dealt = self._deal(lengths, groups)
        # Where others have a micro-batch more, a rank takes part in their collectives, untrained.
        idle = (int(lengths.sum(axis=1).argmin()),)
        # The pairs of a micro-batch are of padded micro-batches of one size.
        sizes = np.bincount(groups)[groups]
        parts = [Part(tuple(part), len(part) / sizes[part[0]]) if part else Part(idle, 0.0) for part in dealt[rank]]
        own = [np.flatnonzero(groups == i * world_size + rank).tolist() for i in range(len(batches))]
        last = PairSlot(
            [collate([examples[i] for i in part.pairs]) for part in parts],
            imbalance(dealt, lengths.sum(axis=1), self.quadratic),
            parts=parts, padded=own, examples=examples, lengths=lengths, widths=self._widths(lengths, groups),
        )  # fmt: skip
        return [PairSlot() for _ in batches[:-1]] + [last]

    def _widths(self, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """How long the rows of each pair are in its padded micro-batch, `(P,)`."""
        longest = np.zeros(groups.max() + 1, dtype=np.int64)
        np.maximum.at(longest, groups, lengths.max(axis=1))
        return -(-longest[groups] // self.multiple) * self.multiple

    def _deal(self, lengths: np.ndarray, groups: np.ndarray) -> list[list[list[int]]]:
        """For each rank the pairs of each of its micro-batches. Pairs of padded micro-batches of another size, as the
        last of an epoch may be, weigh otherwise and stay among themselves."""
        dealt: list[list[list[int]]] = [[] for _ in range(self.accelerator.num_processes)]
        sizes = np.bincount(groups)[groups]
        for size in np.unique(sizes):
            members = np.flatnonzero(sizes == size)
            for rank, parts in enumerate(self._deal_alike(lengths[members], groups[members])):
                dealt[rank] += [members[part].tolist() for part in parts]
        return dealt

    def _deal_alike(self, lengths: np.ndarray, groups: np.ndarray) -> list[list[list[int]]]:
        world_size, tokens, budget = self.accelerator.num_processes, lengths.sum(axis=1), self.budget
        as_padded = [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]
        rounds = -(-len(as_padded) // world_size)
        as_padded += [[]] * (rounds * world_size - len(as_padded))
        while True:
            dealt = recut_over_ranks(tokens, budget=budget, world_size=world_size, quadratic=self.quadratic)
            fits = all(_footprint(lengths[part]) <= self.budget for parts in dealt for part in parts if part)
            if self.asked is None and len(dealt[0]) > rounds:
                return [as_padded[rank::world_size] for rank in range(world_size)]
            if fits or budget == tokens.max():
                return dealt
            budget = max(int(budget * _LESS), int(tokens.max()))


def _footprint(lengths: np.ndarray) -> float:
    """What a micro-batch of rows `(P, R)` takes of memory, in tokens: its pads come back at the head."""
    return float(lengths.sum() + _PAD * (lengths.max() * lengths.size - lengths.sum()))


def _require_budget(budget: int, tokens: np.ndarray) -> None:
    longest = int(tokens.argmax())
    if tokens[longest] > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than example {longest}, whose rows have "
            f"{tokens[longest]} tokens.",
            why=["a pair is never parted: its loss is of both answers"],
            do=f"Raise it to {tokens[longest]} or more, or lower max_length.",
        )
