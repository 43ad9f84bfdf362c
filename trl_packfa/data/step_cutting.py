"""`packing_strategy="step"`: re-cut the padded run's examples of an optimizer step into fewer, fuller micro-batches.

Every rank plans the steps of a dataset from its lengths ([`StepPlan`]). The lengths of a stream are known once it is
read, so each rank cuts its own documents ([`StreamCutter`]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ..config.common import CommonConfig
from ..errors import InvalidConfig
from ..packing import document_cost, imbalance
from .batching import FREE, KEPT, TOGETHER, deal
from .dataset import count_computed, count_parts, longest_document, read_lengths, read_sizes, split_example
from .flops import quadratic_weight
from .origins import Origins, origins_of_steps
from .steps import CutStep, Cutter, Part, Plan, ReadCutter, micro_batches_of, read_rows

logger = get_logger(__name__)


def count_true_tokens(inputs: Mapping[str, Any]) -> int:
    """Count the true tokens of a batch, by its layout or its mask: a pad may have the id of a true token."""
    return sum(map(_count_true_tokens, micro_batches_of(inputs)))


def _count_true_tokens(inputs: Mapping[str, Any]) -> int:
    layout, mask, labels = (inputs.get(name) for name in ("packed_layout", "attention_mask", "labels"))
    if layout is not None:
        return sum(layout.true_lengths)
    if labels is not None and not (labels != -100).any():  # run only to take part in collectives
        return 0
    return inputs["input_ids"].numel() if mask is None else int(mask.sum())


class TokenBudget(Cutter):
    """The token budget of micro-batches: `max_tokens_per_microbatch`, or the size of the padded run's largest one.

    The padded run's largest one fitted in its memory. `cut` says how steps may be cut, and `why` is the reason of a
    restriction; see [`how_to_cut`]. `lengths` are the tokens of the examples, `longest` those of the one that `which`
    names, and `widest` those of an example with its pads.

    Raises:
        [`InvalidConfig`]: if an example, or a padded micro-batch that must stay together, is longer than the budget.
    """

    budget = 0  # until the batch size is known

    def __init__(
        self, args: CommonConfig, lengths: np.ndarray, *, longest: int, which: str, widest: int, cut: str, why: str
    ) -> None:
        if cut != FREE:
            kept = "run at the same time" if cut == TOGETHER else "stay one micro-batch"
            logger.info("trl-packfa: the examples of a padded micro-batch %s: %s.", kept, why)
        self.how, self.asked, self._widest = cut, args.max_tokens_per_microbatch, widest
        require_budget(args, lengths, longest, which, cut=cut)
        self.use_batch_size(args.per_device_train_batch_size)

    def use_batch_size(self, size: int) -> None:
        """Let the default budget follow the batch size of the padded run; `auto_find_batch_size` lowers it."""
        super().use_batch_size(size)
        self.batch_size, self.budget = size, self.asked or size * self._widest

    @property
    def free_budget(self) -> int | None:
        """The token budget if a user may lower it; `None` if padded micro-batches must stay together."""
        return self.budget if self.how == FREE else None


class StepPlan(TokenBudget, Plan):
    """A plan of steps whose micro-batches have about equal cost, the same number of them on every rank."""

    # By row, the computed and all tokens of each part of an example of several documents that is above the budget.
    parts: dict[int, list[tuple[int, int]]]

    def __init__(self, trainer: Any, *, cut: str, why: str) -> None:
        args, dataset = trainer.args, trainer.train_dataset
        self.rank, self.world_size = args.data_parallel_rank, args.data_parallel_size
        # Terms of the loss that depend on a padded micro-batch, and NEFTune's noise, need them.
        self.tells_origins = cut != FREE or trainer.neftune_noise_alpha is not None
        self.lengths = read_lengths(dataset)
        # For origins: all tokens of each row, those of a prefix that it holds several times included.
        self.sizes = read_sizes(dataset, self.lengths) if self.tells_origins else self.lengths
        self._rows = dataset
        self.quadratic = quadratic_weight(trainer.model)
        row, widest = int(self.lengths.argmax()), int(self.lengths.max())
        longest, which = longest_document(dataset) or (widest, f"document {row}, which has {widest} tokens")
        super().__init__(args, self.lengths, longest=longest, which=which, widest=widest, cut=cut, why=why)

    def use_batch_size(self, size: int) -> None:
        """Let budget and padded micro-batches follow the batch size of the padded run."""
        before = self.budget
        super().use_batch_size(size)
        if self.budget != before:  # reading the rows takes time
            self.parts = count_parts(self._rows, self.lengths, self.budget)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}  # loader workers have the dataset already

    def cut(self, rows: np.ndarray) -> CutStep:
        """Cut a step of these rows, of all ranks."""
        groups, numbers = np.arange(len(rows)) // self.batch_size, np.zeros(len(rows), dtype=np.int64)
        lengths, sizes = self.lengths[rows].astype(np.int64), self.sizes[rows]
        if self.parts and not self.parts.keys().isdisjoint(rows.tolist()):
            # Parts keep the padded micro-batch of their row.
            found = [self.parts.get(row, [whole]) for row, *whole in zip(rows.tolist(), lengths, sizes, strict=True)]
            counts = [len(parts) for parts in found]
            rows, groups = np.repeat(rows, counts), np.repeat(groups, counts)
            numbers = np.concatenate([np.arange(n) for n in counts])
            lengths, sizes = np.array([part for parts in found for part in parts], dtype=np.int64).T
        dealt = deal(
            lengths, groups, cut=self.how, budget=self.budget, world_size=self.world_size, quadratic=self.quadratic
        )
        origins = (
            origins_of_steps(dealt, sizes, groups, rank=self.rank) if self.tells_origins else [None] * len(dealt[0])
        )
        pieces = np.stack([rows, numbers], axis=1)  # a row of the dataset, and which part of it
        shortest = pieces[[lengths.argmin()]].tolist()
        parts = [Part(pieces[part].tolist() if part else shortest, of, is_idle=not part)
                 for part, of in zip(dealt[self.rank], origins, strict=True)]  # fmt: skip
        return CutStep(parts, imbalance(dealt, lengths, self.quadratic))

    def read(self, dataset: Any, rows: Sequence[Any]) -> list[Any]:
        """Read the examples of a micro-batch; of a row that is split, one part."""
        whole = read_rows(dataset, [row for row, _ in rows])
        return [split_example(one, self.budget)[part] for one, (_, part) in zip(whole, rows, strict=True)]


class StreamCutter(TokenBudget, ReadCutter):
    """A cutter of a stream's steps, in which each rank cuts its own documents, once they are read.

    Only the number of micro-batches and their cost are gathered over ranks. A document may have `max_length` tokens.
    """

    def __init__(self, trainer: Any, *, cut: str, why: str) -> None:
        args = trainer.args
        self.accelerator, self.world_size = trainer.accelerator, args.data_parallel_size
        self.quadratic = quadratic_weight(trainer.model)
        longest: int = args.max_length or args.max_tokens_per_microbatch  # one is required of a stream
        which = f"a document of a stream, which may have {longest} tokens"
        lengths = np.full(args.per_device_train_batch_size, longest)
        super().__init__(args, lengths, longest=longest, which=which, widest=longest, cut=cut, why=why)

    def loading(self, collate: Any) -> Any:
        """Return the loader's collator: examples are collated once their step is cut."""
        return list

    def cut(self, batches: Sequence[list[dict[str, Any]]]) -> CutStep:
        """Cut a step, given by padded micro-batch."""
        found = [
            (i, part) for i, batch in enumerate(batches) for one in batch for part in split_example(one, self.budget)
        ]
        groups, examples = np.array([i for i, _ in found]), [part for _, part in found]
        lengths = np.array([count_computed(example) for example in examples], dtype=np.int64)
        sizes = np.array([len(example["input_ids"]) for example in examples], dtype=np.int64)
        dealt = deal(lengths, groups, cut=self.how, budget=self.budget, world_size=1, quadratic=self.quadratic)
        own = dealt[0]
        count, costs = len(own), [float(document_cost(lengths, self.quadratic).sum())]
        if self.world_size > 1:
            ranks = gather_object([(count, costs[0])])
            count, costs = max(n for n, _ in ranks), [cost for _, cost in ranks]
        # A rank with fewer micro-batches than the others runs an untrained one first, for their collectives.
        idle = Part([examples[int(lengths.argmin())]], Origins.none(), is_idle=True)
        origins = origins_of_steps(dealt, sizes, groups, rank=0)
        share = count / len(own) * origins[0].share
        parts = [Part([examples[i] for i in part], replace(of, share=share))
                 for part, of in zip(own, origins, strict=True)]  # fmt: skip
        return CutStep([idle] * (count - len(own)) + parts, max(costs) * len(costs) / sum(costs))


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
    """Require that a budget of the user holds the longest example, and padded micro-batches that stay together."""
    budget, batch_size = args.max_tokens_per_microbatch, args.per_device_train_batch_size
    if budget is None:
        return
    if longest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than {which}.",
            why=["an example is never cut into several micro-batches"],
            do=f"Raise it to {longest} or more, or lower max_length to {budget}.",
        )
    largest = int(np.sort(lengths)[-batch_size:].sum())  # whichever examples share a padded micro-batch
    if cut != FREE and largest > budget:
        raise InvalidConfig(
            f"max_tokens_per_microbatch={budget} is smaller than a padded micro-batch of {batch_size} examples, "
            f"which may hold {largest} tokens.",
            why=["the loss depends on whole padded micro-batches, as the routers' auxiliary loss does"],
            do=f"Raise it to {largest} or more, or lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps. For experts, router_aux_loss_coef=0.0 switches the auxiliary loss off.",
        )
