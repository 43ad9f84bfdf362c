"""`packing_strategy="step"`: an optimizer step sees the examples of the padded run, in fewer, fuller micro-batches.

The data loader delivers what the padded run's would, in its order, but uncollated; the examples of one step are then
re-cut and collated. The Trainer counts one slot per padded micro-batch, so its bookkeeping (steps, epochs, schedule,
resuming) is the padded run's: all but the last slot of a step are idle, the last holds the step's micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import IterableDataset

from ..errors import InvalidConfig
from ..layout import PackedLayout
from ..packing import imbalance
from .batching import FREE, KEPT, TOGETHER, deal
from .config import PackedSFTConfig
from .dataset import read_lengths
from .flops import quadratic_weight
from .origins import ORIGINS, origins_of_steps


class Documents:
    """The examples of one padded micro-batch, uncollated; opaque, so that nothing on the way looks inside."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"these are the examples of a padded micro-batch, not yet packed: there is no {key!r}. "
            "packing_strategy='step' cuts a whole optimizer step into micro-batches when it runs. "
            "trainer.preview_batch() shows a packed one as text; .examples holds the examples."
        )


class Slot(dict):
    """What the Trainer takes for one micro-batch: the token ids that it counts, and the micro-batches to run."""

    def __init__(self, micro_batches: Sequence[dict[str, Any]], imbalance: float = 1.0) -> None:
        # End to end, `(1, T)`: of a slot the Trainer counts tokens and operations by its `input_ids`.
        ids = [micro_batch["input_ids"].reshape(1, -1) for micro_batch in micro_batches]
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
        cut (`str`, *optional*, defaults to `FREE`):
            How it may cut, see [`how_to_cut`].

    Raises:
        [`InvalidConfig`]: if the dataset is a stream and nothing bounds its documents, or a document, or a padded
            micro-batch that must stay together, is longer than the budget.
    """

    def __init__(
        self, args: PackedSFTConfig, *, train_dataset: Any, model: Any, accelerator: Accelerator, cut: str = FREE
    ) -> None:
        self.accelerator, self.how = accelerator, cut
        lengths, which = _longest(train_dataset, args)
        longest = int(lengths.max())
        if args.max_tokens_per_microbatch is not None:
            require_budget(args.max_tokens_per_microbatch, longest, which)
            if cut != FREE:
                require_whole(args.max_tokens_per_microbatch, lengths, args.per_device_train_batch_size)
        self.budget = args.max_tokens_per_microbatch or args.per_device_train_batch_size * longest
        self.quadratic = quadratic_weight(model)

    @property
    def free_budget(self) -> int | None:
        """The budget, where a smaller one would not tear padded micro-batches that stay together."""
        return self.budget if self.how == FREE else None

    def cut(
        self, batches: Sequence[Documents], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> list[Slot]:
        """One slot per padded micro-batch, all idle but the last, which holds the step's examples re-cut."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        examples, groups = of_all_ranks(batches, self.accelerator)
        lengths = np.array([len(example["input_ids"]) for example in examples], dtype=np.int64)
        dealt = deal(
            lengths, groups, cut=self.how, budget=self.budget, world_size=world_size, quadratic=self.quadratic
        )
        # Where others have a micro-batch more, a rank takes part in their collectives, untrained.
        shortest = int(lengths.argmin())
        idle = {**examples[shortest], "labels": [-100] * int(lengths[shortest])}
        micro_batches = [
            collate([examples[i] for i in part]) if part else _untrue(collate([idle])) for part in dealt[rank]
        ]
        origins = origins_of_steps(dealt, lengths, groups, rank=rank)
        for micro_batch, origin in zip(micro_batches, origins, strict=True):
            micro_batch[ORIGINS] = origin
        last = Slot(micro_batches, imbalance=imbalance(dealt, lengths, self.quadratic))
        return [Slot([]) for _ in batches[:-1]] + [last]


def of_all_ranks(
    batches: Sequence[Documents], accelerator: Accelerator
) -> tuple[tuple[dict[str, Any], ...], np.ndarray]:
    """The examples of a step of all ranks, rank by rank, and the number of each one's padded micro-batch: every rank
    makes the same plan of all of them. Token ids are small beside what a step computes."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    # Numbered as the ranks run them, in turn: on 2 ranks rank 0's micro-batches are 0, 2, 4. Equal numbers mean the
    # same padded micro-batch.
    mine = [(i * world_size + rank, example) for i, batch in enumerate(batches) for example in batch.examples]
    numbers, examples = zip(*(mine if world_size == 1 else gather_object(mine)), strict=True)
    return examples, np.array(numbers)


def require_aligned(slot: Slot, accelerator: Accelerator, accumulation: int) -> None:
    """Refuse a slot that the Trainer takes for another of its step than it is: an optimizer step without gradients, or
    gradients that no optimizer step takes.

    Args:
        slot ([`Slot`]):
            About to run.
        accelerator (`Accelerator`):
            Whose gradients the Trainer has told to be whole where it makes an optimizer step after the slot.
        accumulation (`int`):
            `gradient_accumulation_steps` as they are now.

    Raises:
        [`InvalidConfig`]: if `gradient_accumulation_steps` was changed at a step where the Trainer's count does not
            allow it.
    """
    if bool(slot.micro_batches) != accelerator.sync_gradients:
        raise InvalidConfig(
            f"gradient_accumulation_steps was changed to {accumulation} while training, in the middle of a step.",
            why=[
                "the Trainer makes an optimizer step where its count of micro-batches is a multiple of it, and the "
                "examples of this step were cut together"
            ],
            do="Change it where the number of micro-batches so far is a multiple of the new value, or before train(); "
            "packing_strategy='minibatch' steps wherever the Trainer does.",
        )


def count_every_rank(accelerator: Accelerator) -> None:
    """Let `gather_for_metrics` return what every rank gives, in the last step of an epoch too: accelerate takes sums
    of ranks for examples there, and leaves out as many as the last batch repeats."""
    loader = accelerator.gradient_state.active_dataloader
    if loader is not None:
        loader.remainder = 0


def in_turn(slot: Slot, *, accelerator: Accelerator, model: Any, syncs_itself: bool) -> Iterator[dict[str, Any]]:
    """The micro-batches of a step, each to be run while it is held: gradients are reduced over ranks at the last.

    Args:
        slot ([`Slot`]):
            Of the whole step.
        accelerator (`Accelerator`), model (`torch.nn.Module`):
            The wrapped model, whose reduction waits.
        syncs_itself (`bool`):
            Whether the engine reduces and steps where it is told that a step ends (DeepSpeed).
    """
    for i, micro_batch in enumerate(slot.micro_batches):
        is_last = i + 1 == len(slot.micro_batches)
        # The Trainer has set it for the whole slot. accelerate clips and steps where it is on.
        accelerator.gradient_state._set_sync_gradients(is_last)
        # DDP reduces in the backward of whatever runs outside of `no_sync`: once a step, not once a micro-batch.
        with nullcontext() if is_last or syncs_itself else accelerator.no_sync(model):
            yield micro_batch


def how_to_cut(
    args: PackedSFTConfig,
    *,
    balances_experts: bool,
    counts_tokens: bool = True,
    own_loss: bool = False,
    world_size: int = 1,
) -> tuple[str, str]:
    """How `step` may cut so that the loss stays the padded run's (`FREE`, `TOGETHER`, `KEPT`), and why not freely.

    Args:
        args ([`PackedSFTConfig`]):
            Of the run.
        balances_experts (`bool`):
            Whether the routers' auxiliary loss is trained, which is of a padded micro-batch as a whole.
        counts_tokens (`bool`, *optional*, defaults to `True`):
            Whether losses are divided by the tokens of the step, not by those of each micro-batch.
        own_loss (`bool`, *optional*, defaults to `False`):
            Whether the user's `compute_loss_func` makes the loss.
        world_size (`int`, *optional*, defaults to `1`):
            Number of ranks.
    """
    if not counts_tokens:
        return KEPT, "the model's forward takes no num_items_in_batch: its loss is a mean over each micro-batch"
    if own_loss:
        return KEPT, "compute_loss_func makes the loss of each micro-batch"
    if world_size > 1 and not args.average_tokens_across_devices:
        return KEPT, "average_tokens_across_devices=False: each rank's loss is a mean over its own tokens"
    if balances_experts:
        return TOGETHER, "the routers' auxiliary loss is of each padded micro-batch"
    return FREE, ""


def require_budget(budget: int, longest: int, which: str) -> None:
    """No document may be longer than the user's budget of tokens a micro-batch.

    Raises:
        [`InvalidConfig`]: naming the document that is.
    """
    if longest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than {which}.",
            why=["a document is never cut into several micro-batches"],
            do=f"Raise it to {longest} or more, or lower max_length to {budget}.",
        )


def require_whole(budget: int, lengths: np.ndarray, batch_size: int) -> None:
    """A padded micro-batch that stays together must fit the user's budget, whichever examples share it.

    Raises:
        [`InvalidConfig`]: naming what the largest may hold.
    """
    largest = int(np.sort(lengths)[-batch_size:].sum())
    if largest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than a padded micro-batch of {batch_size} examples, "
            f"which may hold {largest} tokens.",
            why=[
                "with this model or these arguments the loss is not a sum over single tokens: examples that share a "
                "padded micro-batch (for the routers' auxiliary loss, say) must run at the same time"
            ],
            do=f"Raise it to {largest} or more, or lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps; for experts, router_aux_loss_coef=0.0 leaves the auxiliary loss out.",
        )


def _untrue(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch whose tokens all count as padding."""
    layout: PackedLayout | None = micro_batch.get("packed_layout")
    if layout is not None:
        micro_batch["packed_layout"] = replace(layout, padding=layout.num_tokens)
    return micro_batch


def _longest(train_dataset: Any, args: PackedSFTConfig) -> tuple[np.ndarray, str]:
    """Tokens of each document, and which is the longest; of a stream, of as many as share a padded micro-batch, as
    long as they may be."""
    if not isinstance(train_dataset, IterableDataset):
        lengths = read_lengths(train_dataset)
        return lengths, f"document {int(lengths.argmax())}, which has {int(lengths.max())} tokens"
    longest = longest_of_stream(args)
    which = f"a document of a stream, which may have {longest} tokens"
    return np.full(args.per_device_train_batch_size, longest), which


def longest_of_stream(args: PackedSFTConfig) -> int:
    """The most tokens that a document of a stream may have.

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
