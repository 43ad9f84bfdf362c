"""How documents become micro-batches and steps: what a plan needs to know of the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from .config import PackedSFTConfig
from .packing import PackedBatchSampler

ROW_STRATEGIES = ("bfd", "bfd_split", "wrapped")
PADDED = "padded"

Sampler = TypeVar("Sampler", bound=PackedBatchSampler)


@dataclass(frozen=True)
class Batching:
    """Strategy, sizes and number of processes. `strategy` is a `packing_strategy`, or `"padded"`: TRL unpacked.

    `budget` is the tokens of a micro-batch of `"step"` (default: what the padded run would hold at its worst),
    `quadratic` the cost of a token attending to a token in units of the cost of a token, `pad_to` TRL's
    `pad_to_multiple_of`.
    """

    strategy: str
    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    max_length: int | None = None
    budget: int | None = None
    quadratic: float = 0.0
    sampling: str = "random"
    drop_last: bool = False
    pad_to: int = 1
    seed: int = 0

    @classmethod
    def of(
        cls,
        args: PackedSFTConfig,
        *,
        strategy: str | None = None,
        world_size: int | None = None,
        quadratic: float = 0.0,
    ) -> Batching:
        """As the arguments say, perhaps for another strategy or number of processes."""
        return cls(
            strategy=strategy or (args.packing_strategy if args.packing else None) or PADDED,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            world_size=world_size or args.world_size,
            max_length=args.max_length,
            budget=args.max_tokens_per_microbatch,
            quadratic=quadratic,
            sampling=str(args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            pad_to=args.pad_to_multiple_of or 1,  # type: ignore[arg-type]  # SFTConfig has made it an int
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def micro_batch_tokens(self, lengths: np.ndarray) -> int:
        """Tokens that no micro-batch exceeds, pads included."""
        longest = int(lengths.max(initial=0))
        if self.strategy == "step":
            return max(self.budget or self.batch_size * longest, longest)
        if self.strategy in ROW_STRATEGIES:
            return self.batch_size * (self.max_length or longest)
        if self.strategy == PADDED:
            return self.batch_size * int(self.padded(np.array(longest)))
        largest = np.partition(lengths, -min(self.batch_size, len(lengths)))[-self.batch_size :]
        return int(self.padded(largest.sum()))

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """Row lengths in tokens, rounded up to `pad_to`."""
        return -(-tokens // self.pad_to) * self.pad_to

    def draw(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths by micro-batch of a rank, rank and example, int64, 0 where there is none: as accelerate deals
        batches to ranks, the first documents once more where the last round lacks some."""
        drawn = lengths[self._order(lengths)]
        per_round = self.world_size * self.batch_size
        if self.drop_last:
            drawn = drawn[: len(drawn) // per_round * per_round]
        missing = -len(drawn) % per_round
        more = np.resize(drawn, missing) if self.world_size > 1 else np.zeros(missing, dtype=np.int64)
        return np.concatenate([drawn, more]).reshape(-1, self.world_size, self.batch_size)

    def _order(self, lengths: np.ndarray) -> np.ndarray:
        """Indices as the Trainer's sampler would give them, from another random draw."""
        if self.sampling == "sequential":
            return np.arange(len(lengths))
        if self.sampling == "group_by_length":
            generator = torch.Generator().manual_seed(self.seed)
            return np.array(get_length_grouped_indices(lengths.tolist(), self.batch_size, generator=generator))
        return np.random.default_rng(self.seed).permutation(len(lengths))

    def row_sampler(self, lengths: np.ndarray, *, rank: int = 0, kind: type[Sampler] = PackedBatchSampler) -> Sampler:
        """A rank's sampler of rows, of a strategy that fills them."""
        assert self.max_length is not None, "the config requires max_length for rows"
        return kind(
            lengths,
            rank=rank,
            capacity=self.max_length,
            rows_per_batch=self.batch_size,
            seed=self.seed,
            world_size=self.world_size,
            shuffle=self.sampling != "sequential",
            wrapped=self.strategy == "wrapped",
            quadratic=self.quadratic,
        )
