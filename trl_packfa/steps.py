"""`packing_strategy="step"`: an optimizer step sees the examples of the padded run, in fewer, fuller micro-batches.

The data loader delivers what the padded run's would, in its order, but uncollated; the examples of one step are then
re-cut and collated. The Trainer counts one slot per padded micro-batch, so its bookkeeping (steps, epochs, schedule,
resuming) is the padded run's: all but the last slot of a step are idle, the last holds the step's micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import IterableDataset

from .arithmetic import quadratic_weight
from .config import PackedSFTConfig
from .errors import InvalidConfig
from .layout import PackedLayout
from .packing import imbalance, recut_over_ranks
from .tokenized import read_lengths


class Documents:
    """The examples of one padded micro-batch, uncollated; opaque, so that nothing on the way looks inside."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)


class Slot(dict):
    """What the Trainer takes for one micro-batch: the token ids that it counts, and the micro-batches to run."""

    def __init__(self, micro_batches: Sequence[dict[str, Any]], imbalance: float = 1.0) -> None:
        ids = [micro_batch["input_ids"] for micro_batch in micro_batches]
        super().__init__(input_ids=torch.cat(ids, dim=1) if ids else torch.empty((1, 0), dtype=torch.long))
        self.micro_batches, self.imbalance = list(micro_batches), imbalance


class StepCutter:
    """Cuts the examples of a step over ranks and micro-batches, level in cost, equally many on every rank.

    Args:
        args ([`PackedSFTConfig`]):
            Says the token budget: `max_tokens_per_microbatch`, or what the padded run would hold at its worst.
        train_dataset (`Dataset` or `IterableDataset`):
            Tokenized and cut to `max_length`.
        model (`torch.nn.Module`):
            Its shape says how dear attention is beside the matrix products.
        accelerator (`Accelerator`):
            Knows the other ranks.

    Raises:
        [`InvalidConfig`]: if the dataset is a stream and nothing bounds its documents, or a document is longer than
            the budget.
    """

    def __init__(self, args: PackedSFTConfig, *, train_dataset: Any, model: Any, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        longest, which = _longest(train_dataset, args)
        if args.max_tokens_per_microbatch is not None:
            require_budget(args.max_tokens_per_microbatch, longest, which)
        self.budget = args.max_tokens_per_microbatch or args.per_device_train_batch_size * longest
        self.quadratic = quadratic_weight(model)

    def cut(
        self, batches: Sequence[Documents], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> list[Slot]:
        """One slot per padded micro-batch, all idle but the last, which holds the step's examples re-cut."""
        examples = self._of_all_ranks([example for batch in batches for example in batch.examples])
        lengths = np.array([len(example["input_ids"]) for example in examples], dtype=np.int64)
        world_size = self.accelerator.num_processes
        dealt = recut_over_ranks(lengths, budget=self.budget, world_size=world_size, quadratic=self.quadratic)
        # Where others have a micro-batch more, a rank takes part in their collectives, untrained.
        shortest = int(lengths.argmin())
        idle = {**examples[shortest], "labels": [-100] * int(lengths[shortest])}
        mine = dealt[self.accelerator.process_index]
        micro_batches = [collate([examples[i] for i in part]) if part else _untrue(collate([idle])) for part in mine]
        last = Slot(micro_batches, imbalance=imbalance(dealt, lengths, self.quadratic))
        return [Slot([]) for _ in batches[:-1]] + [last]

    def _of_all_ranks(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The examples of the step, rank by rank: every rank makes the same plan of all of them. Token ids are small
        beside what a step computes."""
        return examples if self.accelerator.num_processes == 1 else gather_object(examples)


def require_budget(budget: int, longest: int, which: str) -> None:
    """No document may be longer than the user's budget of tokens a micro-batch.

    Raises:
        [`InvalidConfig`]: naming the document that is.
    """
    if longest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than {which}, of up to {longest} tokens.",
            why=["a document is never cut into several micro-batches"],
            do=f"Raise it to {longest} or more, or lower max_length to {budget}.",
        )


def _untrue(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch none of whose tokens counts."""
    layout: PackedLayout | None = micro_batch.get("packed_layout")
    if layout is not None:
        micro_batch["packed_layout"] = replace(layout, padding=layout.num_tokens)
    return micro_batch


def _longest(train_dataset: Any, args: PackedSFTConfig) -> tuple[int, str]:
    """Tokens of the longest document, and which it is; of a stream, the longest that it may have."""
    if not isinstance(train_dataset, IterableDataset):
        lengths = read_lengths(train_dataset)
        return int(lengths.max()), f"document {int(lengths.argmax())}"
    return longest_of_stream(args), "a document of a stream"


def longest_of_stream(args: PackedSFTConfig) -> int:
    """Tokens that a document of a stream may have.

    Raises:
        [`InvalidConfig`]: if nothing bounds them.
    """
    longest = args.max_length or args.max_tokens_per_microbatch
    if longest is None:
        raise InvalidConfig(
            "packing_strategy='step' on a stream needs a token budget: max_length is None.",
            why=["the longest document of a stream is not known beforehand"],
            do="Set max_length or max_tokens_per_microbatch, or use packing_strategy='minibatch'.",
        )
    return longest
