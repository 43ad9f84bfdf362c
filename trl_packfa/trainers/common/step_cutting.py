"""`packing_strategy="step"`: re-cut the padded run's examples of an optimizer step into fewer, fuller micro-batches.

The loader yields the padded run's examples uncollated; those of one step are re-cut and then collated. The Trainer
gets one slot per padded micro-batch, so its bookkeeping (steps, epochs, schedule, resuming) is the padded run's. The
last slot of a step holds all its micro-batches; the other slots are idle.

Shape letters: T tokens (B * L), G padded micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import IterableDataset

from ...collator import LOSSES
from ...errors import InvalidConfig
from ...layout import PackedLayout
from ...layout.from_call import layout_of
from ...packing import PackingReport, imbalance
from .batching import FREE, KEPT, TOGETHER, deal
from .config import CommonConfig
from .dataset import count_computed, longest_document, read_lengths, split_example
from .flops import quadratic_weight

logger = get_logger(__name__)


class Documents:
    """The uncollated examples of one padded micro-batch. Reading a key raises, so that no code uses it as a batch."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"these are the examples of a padded micro-batch, not yet packed: there is no {key!r}. "
            "packing_strategy='step' cuts a whole optimizer step into micro-batches when it runs. "
            "trainer.preview_batch() shows a packed batch as text; .examples holds the examples."
        )


class Slot(dict):
    """A stand-in for one micro-batch of the Trainer. It holds token ids to count, and the micro-batches to run.

    Attributes:
        imbalance (`float`): time of the step relative to ranks that are always busy.
        untrained (`int`): tokens that TRL counts as trained, but that ranks run only to take part in collectives.
    """

    def __init__(self, micro_batches: Sequence[dict[str, Any]], imbalance: float = 1.0, *, untrained: int = 0) -> None:
        # Concatenated to `(1, T)`, because the Trainer counts tokens and operations by `input_ids`.
        ids = [micro_batch["input_ids"].reshape(1, -1) for micro_batch in micro_batches]
        super().__init__(input_ids=torch.cat(ids, dim=1) if ids else torch.empty((1, 0), dtype=torch.long))
        self.micro_batches, self.imbalance, self.untrained = list(micro_batches), imbalance, untrained


def count_true_tokens(inputs: Mapping[str, Any]) -> int:
    """Count the true tokens of a batch or a slot, by its layout or its mask: a pad may have the id of a true token."""
    if isinstance(inputs, Slot):
        return sum(map(count_true_tokens, inputs.micro_batches))
    layout, mask, labels = (inputs.get(name) for name in ("packed_layout", "attention_mask", "labels"))
    if layout is not None:
        return sum(layout.true_lengths)
    if labels is not None and not (labels != -100).any():  # run only to take part in collectives
        return 0
    return inputs["input_ids"].numel() if mask is None else int(mask.sum())


class Cutter:
    """Base class of the cutters of steps: their loader yields examples, which are collated once their step is cut."""

    gathers = True  # an example may run on another rank than in the padded run

    @property
    def reports(self) -> dict[str, PackingReport]:
        """Reports of the examples that have trained, by dataset name, if no other code counts them."""
        return {}

    def use_batch_size(self, size: int) -> None:
        """Let the default token budget follow the batch size of the padded run; `auto_find_batch_size` lowers it."""

    def loading(self, collate: Any) -> Any:
        """Return the loader's collator; `collate` is the trainer's."""
        return Documents

    def collator(self, collate: Any) -> Any:
        """Return the collator of a step's examples; `collate` is the trainer's."""
        return collate


class StepCutter(Cutter):
    """A cutter of steps into micro-batches of about equal cost, the same number of them on every rank.

    The examples of all ranks are gathered, because a step's tokens are dealt to all of them. The default of the token
    budget `max_tokens_per_microbatch` is the size of the padded run's largest micro-batch, which fitted in its memory.
    `cut` is how it may cut, and `why` the reason of a restriction; see [`how_to_cut`].

    Raises:
        [`InvalidConfig`]: if the dataset is a stream and its documents have no length limit; or if a document, or a
            padded micro-batch that must stay together, is longer than the budget.
    """

    def __init__(self, trainer: Any, *, cut: str, why: str) -> None:
        args, train_dataset = trainer.args, trainer.train_dataset
        self.args, self.accelerator, self.how = args, trainer.accelerator, cut
        if cut != FREE:
            kept = "run at the same time" if cut == TOGETHER else "stay one micro-batch"
            logger.info("trl-packfa: the examples of a padded micro-batch %s: %s.", kept, why)
        streamed = isinstance(train_dataset, IterableDataset)
        size = args.per_device_train_batch_size
        lengths = np.full(size, longest_of_stream(args)) if streamed else read_lengths(train_dataset)
        longest = int(lengths.max())
        which = f"document {int(lengths.argmax())}, which has {longest} tokens"
        which = f"a document of a stream, which may have {longest} tokens" if streamed else which
        if args.max_tokens_per_microbatch is not None:
            require_budget(args, lengths, *(longest_document(train_dataset) or (longest, which)), cut=cut)
        self._longest = longest
        self.use_batch_size(size)
        self.quadratic = quadratic_weight(trainer.model)

    def use_batch_size(self, size: int) -> None:
        """Set the default budget, see [`Cutter`]."""
        self.budget = self.args.max_tokens_per_microbatch or size * self._longest

    @property
    def free_budget(self) -> int | None:
        """The token budget if a user may lower it; `None` if padded micro-batches must stay together."""
        return self.budget if self.how == FREE else None

    def cut(self, batches: Sequence[Documents], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> Slot:
        """Re-cut a step, given by padded micro-batch; return the slot that holds it."""
        rank, world_size = self.args.data_parallel_rank, self.args.data_parallel_size
        examples, groups = of_all_ranks(batches, self.accelerator, shared_by=self.args.sequence_parallel)
        if self.how != KEPT:  # examples of several documents may be larger than the budget; parts keep their group
            parts = [split_example(example, self.budget) for example in examples]
            examples = [part for of_one in parts for part in of_one]
            groups = np.repeat(groups, [len(of_one) for of_one in parts])
        lengths = np.array([count_computed(example) for example in examples], dtype=np.int64)
        dealt = deal(
            lengths, groups, cut=self.how, budget=self.budget, world_size=world_size, quadratic=self.quadratic
        )
        # If other ranks have one micro-batch more, this rank runs an untrained one, to take part in their collectives.
        shortest = examples[int(lengths.argmin())]
        idle = {**shortest, "labels": [-100] * len(shortest["input_ids"])}
        idle.pop(LOSSES, None)  # counted where the example is trained
        sizes = np.array([len(example["input_ids"]) for example in examples], dtype=np.int64)
        micro_batches = []
        for part, origins in zip(dealt[rank], origins_of_steps(dealt, sizes, groups, rank=rank), strict=True):
            micro_batch = collate([examples[i] for i in part] or [idle])
            micro_batch[ORIGINS] = origins
            layout: PackedLayout | None = micro_batch.get("packed_layout")
            if layout is not None and not part:  # all its tokens count as padding
                micro_batch["packed_layout"] = replace(layout, padding=layout.num_tokens)
            micro_batches.append(micro_batch)
        return Slot(micro_batches, imbalance=imbalance(dealt, lengths, self.quadratic))


def of_all_ranks(
    batches: Sequence[Documents], accelerator: Accelerator, *, shared_by: int = 1
) -> tuple[tuple[dict[str, Any], ...], np.ndarray]:
    """Gather the examples of a step from all ranks, rank by rank, and the number of each one's padded micro-batch.

    Groups of `shared_by` ranks have the same examples; the first rank sends.
    """
    rank, world_size = accelerator.process_index // shared_by, accelerator.num_processes // shared_by
    sends = accelerator.process_index % shared_by == 0
    # Padded micro-batches are numbered in turn over ranks: with 2 ranks, rank 0 has 0, 2, 4. Examples with the same
    # number are from the same padded micro-batch.
    mine = [(i * world_size + rank, example) for i, batch in enumerate(batches) for example in batch.examples if sends]
    numbers, examples = zip(*(mine if accelerator.num_processes == 1 else gather_object(mine)), strict=True)
    return examples, np.array(numbers)


def run_slot(trainer: Any, slot: Slot, model: Any, run: Callable[[dict[str, Any]], torch.Tensor]) -> torch.Tensor:
    """Run the micro-batches of a slot and return the sum of their losses; an idle slot returns zero.

    `model` is the wrapped one. Only the last micro-batch of a step reduces gradients over ranks. The number of
    micro-batches and their imbalance are added to TRL's metrics.

    Raises:
        [`InvalidConfig`]: if `gradient_accumulation_steps` was changed at a step where the Trainer's count does not
            allow it. Otherwise there would be an optimizer step without gradients, or gradients that no optimizer step
            uses.
    """
    accelerator = trainer.accelerator
    # The Trainer sets `sync_gradients` if an optimizer step follows the slot that is about to run.
    if bool(slot.micro_batches) != accelerator.sync_gradients:
        raise InvalidConfig(
            f"gradient_accumulation_steps was changed to {trainer.args.gradient_accumulation_steps} while training, "
            "in the middle of a step.",
            why=[
                "the Trainer makes an optimizer step when its count of micro-batches is a multiple of it, but the "
                "examples of this step were cut together"
            ],
            do="Change it when the number of micro-batches so far is a multiple of the new value, or before train(). "
            "packing_strategy='minibatch' allows a change at any step.",
        )
    loss = torch.zeros((), device=trainer.args.device)
    for i, micro_batch in enumerate(slot.micro_batches):
        is_last = i + 1 == len(slot.micro_batches)
        # The Trainer has set it for the whole slot. accelerate clips and steps only if it is on.
        accelerator.gradient_state._set_sync_gradients(is_last)
        # DDP reduces in each backward outside of `no_sync`. So it reduces once per step, not once per micro-batch.
        # DeepSpeed's engine itself reduces and steps at the end of a step.
        waits = not is_last and not trainer.is_deepspeed_enabled
        with accelerator.no_sync(model) if waits else nullcontext():
            loss += run(micro_batch)
    if slot.micro_batches:
        trainer._metrics["train"]["micro_batches"].append(len(slot.micro_batches))
        trainer._metrics["train"]["imbalance"].append(slot.imbalance)
    return loss


def count_every_rank(accelerator: Accelerator) -> None:
    """Let `gather_for_metrics` return the values of all ranks in the last step of an epoch too.

    There accelerate would take the ranks' sums for examples, and drop as many as the last batch repeats.
    """
    loader = accelerator.gradient_state.active_dataloader
    if loader is not None:
        loader.remainder = 0


def how_to_cut(
    args: CommonConfig,
    *,
    balances_experts: bool,
    counts_tokens: bool = True,
    own_loss: bool = False,
    world_size: int = 1,
) -> tuple[str, str]:
    """Choose how `step` cuts (`FREE`, `TOGETHER`, `KEPT`) so that the loss stays the padded run's, and say why.

    `balances_experts`: the routers' auxiliary loss is trained, which depends on a whole padded micro-batch.
    `counts_tokens`: losses are divided by the tokens of the step, not by those of each micro-batch. `own_loss`: the
    user's `compute_loss_func` computes the loss. The reason of `FREE` is `""`.
    """
    if not counts_tokens:
        return KEPT, "the model's forward takes no num_items_in_batch: its loss is a mean over each micro-batch"
    if own_loss:
        return KEPT, "compute_loss_func makes the loss of each micro-batch"
    if world_size > 1 and not args.average_tokens_across_devices:
        return KEPT, "average_tokens_across_devices=False: each rank's loss is a mean over its own tokens"
    if balances_experts:
        return TOGETHER, "the routers' auxiliary loss is computed over each padded micro-batch"
    return FREE, ""


def keep_padded(args: CommonConfig, why: str) -> None:
    """Log why steps are not re-cut; refuse a token budget, which has no effect then."""
    if args.max_tokens_per_microbatch is not None:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={args.max_tokens_per_microbatch} has no effect: padded micro-batches stay as "
            "they are.",
            why=[why],
            do="Drop it. To save memory, lower per_device_train_batch_size and raise gradient_accumulation_steps.",
        )
    logger.info("trl-packfa: padded micro-batches stay as they are: %s.", why)


def require_budget(args: CommonConfig, lengths: np.ndarray, longest: int, which: str, *, cut: str) -> None:
    """Require that the user's token budget holds the longest document, and padded micro-batches that stay together."""
    budget, batch_size = args.max_tokens_per_microbatch, args.per_device_train_batch_size
    assert budget is not None, "asked for a budget"
    if longest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than {which}.",
            why=["a document is never cut into several micro-batches"],
            do=f"Raise it to {longest} or more, or lower max_length to {budget}.",
        )
    largest = int(np.sort(lengths)[-batch_size:].sum())  # whichever examples share a padded micro-batch
    if cut != FREE and largest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than a padded micro-batch of {batch_size} examples, "
            f"which may hold {largest} tokens.",
            why=[
                "with this model or these arguments the loss is not a sum over single tokens (for example the "
                "routers' auxiliary loss), so examples that share a padded micro-batch must run at the same time"
            ],
            do=f"Raise it to {largest} or more, or lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps. For experts, router_aux_loss_coef=0.0 switches the auxiliary loss off.",
        )


def longest_of_stream(args: CommonConfig) -> int:
    """Return the largest number of tokens that a document of a stream may have."""
    longest = args.max_length or args.max_tokens_per_microbatch
    if longest is None:
        raise InvalidConfig(
            "packing_strategy='step' on a stream needs a token budget: max_length is None.",
            why=["the longest document of a stream is not known before training"],
            do="Set max_length or max_tokens_per_microbatch, or use packing_strategy='minibatch'.",
        )
    return longest


# The key of a micro-batch's `Origins`. It is removed before the model is called.
ORIGINS = "trl_packfa_origins"


@dataclass(frozen=True)
class Origins:
    """The padded micro-batches of a packed micro-batch's examples.

    Losses that are means over a padded micro-batch (experts' auxiliary loss, pairs) need them to stay the same.
    """

    sizes: tuple[int, ...]  # tokens of each example, in the order of the rows; tokens after them are padding
    groups: tuple[int, ...]  # the number of each example's padded micro-batch, below G
    tokens: tuple[int, ...]  # true tokens of each of the G padded micro-batches, on all ranks together
    longest: tuple[int, ...]  # tokens of each padded micro-batch's longest example
    # Factor for the sum of G losses, with which the mean over a step's micro-batches and ranks is the mean over its
    # padded micro-batches.
    share: float = 1.0
    shared: bool = False  # whether other ranks may hold examples of the same padded micro-batches at the same time

    @classmethod
    def of_whole(cls, inputs: Mapping[str, Any]) -> Origins:
        """Make the origins of a packed batch that holds the examples of exactly one padded micro-batch."""
        layout = inputs.get("packed_layout") or layout_of(dict(inputs))
        if layout is None:  # a user's collator may send a single document without boundaries
            sizes: tuple[int, ...] = (inputs["input_ids"].numel(),)
        else:
            sizes = layout.true_lengths
        return cls(sizes, (0,) * len(sizes), (sum(sizes),), (max(sizes, default=0),))

    def spread(self, values: Sequence[float], ids: torch.Tensor, *, padding: float) -> torch.Tensor:
        """Repeat a value of each example for each of its tokens. `ids` are the batch's; the result has their shape."""
        # For example sizes (2, 1), values (7, 9) and 4 tokens give [7, 7, 9, padding].
        sizes = torch.tensor([*self.sizes, ids.numel() - sum(self.sizes)])
        by_token = torch.repeat_interleave(torch.tensor([*values, padding]), sizes, output_size=ids.numel())
        return by_token.view(ids.shape).to(ids.device)


def origins_of_steps(
    dealt: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray, groups: np.ndarray, *, rank: int
) -> list[Origins]:
    """Return the origins of a rank's micro-batches.

    `dealt` holds, for each rank, the examples of each of its micro-batches; `lengths` and `groups` are the tokens of
    each example and the number of its padded micro-batch.
    """
    _, numbers = np.unique(groups, return_inverse=True)
    tokens, longest = (np.zeros(int(numbers.max()) + 1, dtype=np.int64) for _ in range(2))
    np.add.at(tokens, numbers, lengths)
    np.maximum.at(longest, numbers, lengths)
    # Example: 8 padded micro-batches run in 2 rounds on 2 ranks. TRL averages over rounds and ranks, so it divides by
    # 4 instead of 8. Then the share is 4 / 8.
    share = len(dealt[0]) * len(dealt) / len(tokens)
    found = []
    for index, part in enumerate(dealt[rank]):
        # Number the padded micro-batches that any rank runs now from 0. If they are 5 and 9, examples of 9, 5, 9 get
        # the numbers 1, 0, 1.
        here = np.unique(numbers[[example for other in dealt for example in other[index]]])
        found.append(
            Origins(
                sizes=tuple(lengths[part].tolist()),
                groups=tuple(np.searchsorted(here, numbers[part]).tolist()),
                tokens=tuple(tokens[here].tolist()),
                longest=tuple(longest[here].tolist()),
                share=share,
                shared=len(dealt) > 1,
            )
        )
    return found
