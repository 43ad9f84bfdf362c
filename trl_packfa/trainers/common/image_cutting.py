"""Cutting of a rank's own examples with images into micro-batches. Only their sizes are gathered over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ...packing import PackingReport, document_cost, fewest_micro_batches, imbalance, recut
from .flops import quadratic_weight
from .image_examples import ImageWeights, Processed
from .step_cutting import Documents


class RankStep(NamedTuple):
    """The examples of one rank in a step, in numbers."""

    largest_padded: int  # size of its largest padded micro-batch, in tokens
    sizes: list[np.ndarray]  # of the examples that may share a micro-batch, patches counted as tokens
    cost: float  # arithmetic of all examples
    shortest: int  # tokens of its shortest example
    counts: np.ndarray  # examples, tokens, trained tokens and image tokens, `(4,)`

    def fewest(self, budget: int) -> int:
        """Return the fewest micro-batches that these examples fit into."""
        return sum(fewest_micro_batches(sizes, budget) for sizes in self.sizes)


class OwnCut(NamedTuple):
    """A step as this rank runs it."""

    examples: list[Processed]
    padded: np.ndarray  # the number of each example's padded micro-batch
    parts: list[list[int]]  # the examples of each micro-batch
    count: int  # micro-batches that every rank runs; those beyond `parts` are untrained
    shortest: int  # the example that an untrained micro-batch runs
    ranks: list[RankStep]  # the step of every rank, in numbers
    budget: int  # tokens of a micro-batch

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean of all ranks."""
        return imbalance([[[rank]] for rank in range(len(self.ranks))], np.array([rank.cost for rank in self.ranks]))

    @property
    def untrained(self) -> int:
        """Tokens of untrained micro-batches, of all ranks."""
        return sum(max(self.count - sum(map(len, rank.sizes)), 0) * rank.shortest for rank in self.ranks)


class OwnCutter:
    """A cutter of steps, in which each rank cuts its own examples. The accelerator gathers the sizes of all ranks.

    `budget` is the user's token budget of a micro-batch. `None`: the size of the step's largest padded micro-batch.

    Attributes:
        seen (`np.ndarray`): examples, tokens, trained tokens and image tokens of all ranks so far, `(4,)`.
    """

    def __init__(self, model: Any, accelerator: Accelerator, *, budget: int | None) -> None:
        self.accelerator, self.asked, self.seen = accelerator, budget, np.zeros(4, dtype=np.int64)
        self.weights, self.quadratic = ImageWeights.of(model), quadratic_weight(model)

    @property
    def report(self) -> PackingReport:
        """Counts of the examples that have trained so far: their tokens exist only after collation."""
        return PackingReport.of_seen(*self.seen.tolist())

    def cut(self, batches: Sequence[Documents], *, by_size: bool = False) -> OwnCut:
        """Cut the processed examples of a step, given by padded micro-batch.

        With `by_size`, only examples of padded micro-batches with equally many may share a micro-batch.
        """
        examples: list[Any] = [example for batch in batches for example in batch.examples]
        padded = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        tokens, patches, widths, trained, image_tokens = (
            np.array([getattr(example, name) for example in examples])
            for name in ("tokens", "patches", "width", "trained", "image_tokens")
        )
        # Rounded up, so that a padded micro-batch always fits the budget that is made of it.
        sizes = np.ceil(tokens + self.weights.size * patches).astype(np.int64)
        rows = len(examples[0].lengths)
        cost = document_cost(tokens, self.quadratic / rows) + self.weights.cost * patches
        pads = rows * np.array([widths[padded == group].max() for group in padded]) - tokens
        shared = np.bincount(padded)[padded] if by_size else np.zeros(len(examples), dtype=np.int64)
        together = [np.flatnonzero(shared == number) for number in np.unique(shared)]
        mine = RankStep(
            largest_padded=int(np.bincount(padded, weights=sizes + pads).max()),
            sizes=[sizes[members] for members in together],
            cost=float(cost.sum()),
            shortest=int(tokens.min()),
            counts=np.array([len(examples), tokens.sum(), trained.sum(), image_tokens.sum()]),
        )
        ranks: list[RankStep] = [mine] if self.accelerator.num_processes == 1 else gather_object([mine])
        self.seen = self.seen + sum(rank.counts for rank in ranks)
        budget = self.asked or max(rank.largest_padded for rank in ranks)
        count = max(rank.fewest(budget) for rank in ranks)
        if self.asked is None and count > len(batches):  # best fit does not always find the fewest
            count, parts = len(batches), [np.flatnonzero(padded == group).tolist() for group in range(len(batches))]
        else:
            parts = []
            for members in together:
                # A rank with fewer than the others makes more of its last ones, if they are enough.
                spare = count - mine.fewest(budget) if members is together[-1] else 0
                wanted = min(fewest_micro_batches(sizes[members], budget) + spare, len(members))
                cut = recut(sizes[members], cost=cost[members], budget=budget, num_micro_batches=wanted)
                parts += [members[part].tolist() for part in cut]
        # The last micro-batch of a step reduces gradients over ranks. DDP leaves out a vision tower that no rank runs
        # then, so micro-batches with images come last.
        parts.sort(key=lambda part: (bool(patches[part].any()), -cost[part].sum()))
        return OwnCut(examples, padded, parts, count, int(tokens.argmin()), ranks, budget)


def why_images_stay(model: nn.Module, neftune_noise_alpha: float | None) -> str:
    """Return why other micro-batches of images would train another loss; `""` if they train the same."""
    if neftune_noise_alpha is not None:
        return "NEFTune's noise depends on the padded row, and the model embeds padded rows"
    norm = next((name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), "")
    return f"'{norm}' is a batch norm, which depends on all images of a micro-batch" if norm else ""
