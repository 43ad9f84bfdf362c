"""Batches of optimizer steps: which rows of the dataset each one holds, and how the Trainer runs them.

The order of an epoch is seeded, and lengths are a column. So every rank plans the steps of all ranks from lengths
alone, and loads its own micro-batches only. Loader workers cut, collate and prefetch them.

The Trainer counts the padded run's batches. A step with fewer micro-batches begins with empty batches; in one with
more, a batch holds micro-batches that run before it. So steps, epochs, schedule and resuming are the padded run's.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import TrainingArguments, trainer_pt_utils
from transformers.trainer_utils import seed_worker

from ..config.common import CommonConfig
from ..errors import InvalidConfig
from ..override import set_inside
from .collating import CountedBatch, counted
from .collator import LOSSES

# transformers' sampler of batches, in a tuple for `isinstance`; 5.16 does not have it.
REBALANCES = tuple(filter(None, [getattr(trainer_pt_utils, "BatchRebalanceSampler", None)]))


class Place(NamedTuple):
    """A batch of a rank in an optimizer step."""

    rows: np.ndarray  # the step's rows of the dataset, of all ranks in turn, int32
    number: int  # of the batch in its step
    batches: int  # of a rank in the step


@dataclass(frozen=True)
class StepPart:
    """The place of a batch in its step; `count` is the number of micro-batches that every rank runs in the step.

    Attributes:
        before (`tuple[CountedBatch, ...]`): micro-batches that run before the batch, in the same call.
        imbalance (`float`): time of the step relative to ranks that are always busy.
    """

    number: int
    batches: int
    count: int
    before: tuple[CountedBatch, ...] = ()
    imbalance: float = 1.0

    @property
    def held(self) -> range:
        """The micro-batches of the step that this batch holds; none if it is empty. The last batch holds at least one.

        For 3 micro-batches in 4 batches these are none, then 0, 1 and 2.
        """
        return range(self.count * self.number // self.batches, self.count * (self.number + 1) // self.batches)

    @property
    def is_last(self) -> bool:
        """`True` if an optimizer step follows."""
        return self.number + 1 == self.batches

    def holding(self, micro_batches: Sequence[CountedBatch], *, columns: Sequence[str]) -> CountedBatch:
        """Make the batch that holds these micro-batches. An empty one has `columns` `(1, 0)`."""
        if not micro_batches:
            return CountedBatch({name: torch.empty((1, 0), dtype=torch.long) for name in columns}, step=self)
        *before, last = micro_batches
        last.step = replace(self, before=tuple(before))
        return last


def micro_batches_of(batch: Any) -> list[Any]:
    """List the micro-batches of a batch, in the order in which they run."""
    step: StepPart | None = getattr(batch, "step", None)
    if step is None:
        return [batch]
    return [*step.before, batch] if step.held else []


class StepSampler(Sampler):
    """A sampler of one rank's batches, in the order of `sampler`, dealt to ranks as accelerate deals them.

    With `plans` a batch is a [`Place`], which a [`StepRows`] understands; otherwise the rows of a padded micro-batch.
    """

    def __init__(
        self, sampler: Sampler[int], args: CommonConfig, accelerator: Accelerator, *, size: int, plans: bool
    ) -> None:
        self.sampler = sampler  # under the name where accelerate sets its own random sampler
        self.args, self.accelerator, self.plans = args, accelerator, plans
        self.rank, self.world_size = args.data_parallel_rank, args.data_parallel_size
        self.size = size

    @property
    def _per_round(self) -> int:
        return self.size * self.world_size

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.sampler), self._per_round)  # type: ignore[arg-type]  # refused without one
        return rounds + bool(rest and not self.args.dataloader_drop_last)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        start = 0
        while start < len(order):
            # Read at each step: `auto_find_batch_size` and users change it between runs.
            rows = order[start : start + self.args.gradient_accumulation_steps * self._per_round]
            start += len(rows)
            batches = -(-len(rows) // self._per_round)
            for number in range(batches):
                first = (number * self.world_size + self.rank) * self.size
                yield [Place(rows, number, batches)] if self.plans else rows[first : first + self.size].tolist()

    def _order(self) -> np.ndarray:
        """Return the rows of an epoch, the same on every rank, completed to whole rounds with the first ones."""
        order = np.fromiter(self.sampler, dtype=np.int32)
        if self.world_size == 1:
            return order[: len(self) * self.size]
        if not isinstance(self.sampler, (SeedableRandomSampler, SequentialSampler)):
            order = self._as_main_rank(order)  # another sampler may draw from a generator of its rank
        if self.args.dataloader_drop_last:
            return order[: len(self) * self._per_round]
        if self.plans and not self.accelerator.even_batches:  # a plan needs no even rounds
            return order
        # `resize` repeats from the start, as accelerate's `even_batches` does.
        return np.concatenate([order, np.resize(order, -len(order) % self._per_round)])

    def _as_main_rank(self, order: np.ndarray) -> np.ndarray:
        if len(set(gather_object([zlib.crc32(order.tobytes())]))) == 1:
            return order
        return broadcast_object_list([order])[0]


class Part(NamedTuple):
    """A micro-batch of a cut step.

    `examples` are rows of the dataset, or what was read of them. `facts` are what its loss needs of the padded run. An
    idle one trains no token: other ranks have more micro-batches, and this rank takes part in their collectives.
    """

    examples: Sequence[Any]
    facts: Any = None
    is_idle: bool = False


class CutStep(NamedTuple):
    """This rank's micro-batches of a step, as many as every rank's, and the step's imbalance ([`StepPart`])."""

    parts: list[Part]
    imbalance: float


class Cutter:
    """Base class of cutters of steps."""

    columns: Sequence[str] = ("input_ids", "labels")  # of an empty batch

    def use_batch_size(self, size: int) -> None:
        """Follow the batch size of the padded run, which `auto_find_batch_size` lowers."""

    def collated(self, part: Part, collate: Callable[[list[Any]], dict[str, Any]]) -> CountedBatch:
        """Collate a micro-batch of examples. All tokens of an idle one count as padding."""
        examples: Any = part.examples
        if part.is_idle:  # what was lost of an example is counted where it trains
            examples = [{name: value for name, value in example.items() if name != LOSSES}
                        | {"labels": [-100] * len(example["input_ids"])} for example in examples]  # fmt: skip
        made = counted(collate(list(examples)), origins=part.facts)
        if part.is_idle and (layout := made.get("packed_layout")) is not None:
            made["packed_layout"] = replace(layout, padding=layout.num_tokens)
        return made


class ReadCutter(Cutter, ABC):
    """Base class of cutters of examples that have no lengths before they are read: each rank cuts its own."""

    @abstractmethod
    def loading(self, collate: Any) -> Any:
        """Return the loader's collator, which leaves examples single; `collate` is the one of micro-batches."""

    @abstractmethod
    def cut(self, batches: Sequence[list[Any]]) -> CutStep:
        """Cut a step, given by padded micro-batch."""

    def batches(self, read: Sequence[list[Any]], collate: Callable[[list[Any]], dict[str, Any]]) -> list[CountedBatch]:
        """Make as many batches of a step as padded micro-batches were read."""
        cut = self.cut(read)
        made = [self.collated(part, collate) for part in cut.parts]
        steps = [StepPart(number, len(read), len(made), imbalance=cut.imbalance) for number in range(len(read))]
        return [step.holding([made[i] for i in step.held], columns=self.columns) for step in steps]


class Plan(Cutter, ABC):
    """Base class of plans: which rows a rank's micro-batches of a step hold, from lengths alone."""

    # Rows and micro-batches of the last step: its batches are read one by one.
    _last: tuple[np.ndarray, CutStep] | None = None

    def use_batch_size(self, size: int) -> None:
        """Forget the last step: it was cut for another batch size."""
        self._last = None

    @abstractmethod
    def cut(self, rows: np.ndarray) -> CutStep:
        """Cut a step of these rows, of all ranks."""

    def read(self, dataset: Any, rows: Sequence[Any]) -> list[Any]:
        """Read the examples of a micro-batch."""
        return read_rows(dataset, rows)

    def batch(self, dataset: Any, place: Place, collator: Callable[[list[Any]], dict[str, Any]]) -> CountedBatch:
        """Read and collate the micro-batches of a batch."""
        cut = self.cut_once(place.rows)
        step = StepPart(place.number, place.batches, len(cut.parts), imbalance=cut.imbalance)
        parts = [cut.parts[i] for i in step.held]
        read = [part._replace(examples=self.read(dataset, part.examples)) for part in parts]
        return step.holding([self.collated(part, collator) for part in read], columns=self.columns)

    def cut_once(self, rows: np.ndarray) -> CutStep:
        """Cut a step, or return the last cut if it was of the same rows."""
        if self._last is None or not (self._last[0] is rows or np.array_equal(self._last[0], rows)):
            self._last = rows, self.cut(rows)
        return self._last[1]


class StepRows(Dataset):
    """A dataset whose items are the collated batches of a plan, by their [`Place`]. Loader workers make them."""

    def __init__(self, dataset: Any, plan: Plan, collator: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.dataset, self.plan, self.collator = dataset, plan, collator

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> CountedBatch:
        return self.plan.batch(self.dataset, place, self.collator)


def loader_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of a data loader that the Trainer gives its own."""
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
        "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    }


def rank_loader(dataset: Any, sampler: Any, collator: Any, args: TrainingArguments, accelerator: Accelerator) -> Any:
    """Build the loader of a sampler that yields the batches of this rank only.

    accelerate puts batches on the device, sets the epoch and, like in stock TRL, replaces a random sampler by its own.
    """
    loader: Any = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, **loader_options(args))
    with set_inside(accelerator.dataloader_config, split_batches=False):  # they are split already
        loader = accelerator.prepare(loader)
    if (shards := loader.batch_sampler) is not sampler:  # otherwise accelerate would deal them to ranks again
        shards.num_processes, shards.process_index = 1, 0
    return loader


def read_rows(dataset: Any, rows: Sequence[int]) -> list[Any]:
    """Read rows of a dataset, all at once if it can."""
    many = getattr(dataset, "__getitems__", None)  # torch's loader asks in the same way
    return many(list(rows)) if many is not None else [dataset[row] for row in rows]


def require_length(sampler: Any) -> None:
    """Refuse a user's sampler that does not say how many rows it draws in an epoch."""
    if not hasattr(sampler, "__len__"):
        raise InvalidConfig(
            f"{type(sampler).__name__} of _get_train_sampler has no length.",
            why=["the steps of an epoch are planned before it begins"],
            do="Give it a __len__: the number of rows that it draws.",
        )


def require_whole_step(batches: Sequence[Any], args: CommonConfig) -> None:
    """Refuse batches that are no whole step: the Trainer would make its optimizer step at another batch."""
    parts = [part for batch in batches if (part := getattr(batch, "step", None)) is not None]
    if parts and [(part.number, part.batches) for part in parts] != [(i, len(batches)) for i in range(len(batches))]:
        raise InvalidConfig(
            f"gradient_accumulation_steps was changed to {args.gradient_accumulation_steps} while training.",
            why=["the next steps were cut already, with the value from before"],
            do="Change it before train(). packing_strategy='minibatch' allows a change at any step.",
        )


def run_batch(trainer: Any, batch: Any, model: Any, run: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Run the micro-batches of a batch and return the sum of their losses; zero if it is empty.

    `model` is the wrapped one. The number of the step's micro-batches and their imbalance are added to TRL's metrics.
    """
    if (step := getattr(batch, "step", None)) is None:  # of a loader that plans nothing
        return run(batch)
    accelerator = trainer.accelerator
    steps = accelerator.sync_gradients
    loss = torch.zeros((), device=trainer.args.device)
    for micro_batch in micro_batches_of(batch):
        waits = micro_batch is not batch
        # accelerate clips and steps only if it is on.
        accelerator.sync_gradients = steps and not waits
        # DDP reduces in each backward outside of `no_sync`. So it reduces once per step, not once per micro-batch.
        # DeepSpeed's engine itself reduces and steps at the end of a step.
        with accelerator.no_sync(model) if waits and not trainer.is_deepspeed_enabled else nullcontext():
            loss += run(micro_batch)
    if step.is_last:
        trainer._metrics["train"]["micro_batches"].append(step.count)
        trainer._metrics["train"]["imbalance"].append(step.imbalance)
    return loss
