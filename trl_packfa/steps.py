"""`packing_strategy="step"`: an optimizer step sees the examples of the padded run, in fewer, fuller micro-batches.

The data loader delivers what the padded run's would, in its order, but uncollated; the examples of one step are then
re-cut and collated. The Trainer counts one slot per padded micro-batch, so its bookkeeping (steps, epochs, schedule,
resuming) is the padded run's: all but the last slot of a step are idle, the last holds the step's micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import IterableDataset
from transformers import PreTrainedConfig

from .config import PackedSFTConfig
from .errors import InvalidConfig
from .packing import fewest_micro_batches, recut
from .tokenized import read_lengths


class Documents:
    """The examples of one padded micro-batch, uncollated; opaque, so that nothing on the way looks inside."""

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)


class Slot(dict):
    """What the Trainer takes for one micro-batch: the token ids that it counts, and the micro-batches to run."""

    def __init__(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        ids = [micro_batch["input_ids"] for micro_batch in micro_batches]
        super().__init__(input_ids=torch.cat(ids, dim=1) if ids else torch.empty((1, 0), dtype=torch.long))
        self.micro_batches = list(micro_batches)


class StepCutter:
    """Cuts the examples of a step, the same number of times on every rank.

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
        [`InvalidConfig`]: if the dataset is a stream and nothing bounds its documents.
    """

    def __init__(self, args: PackedSFTConfig, *, train_dataset: Any, model: Any, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.budget = args.max_tokens_per_microbatch or args.per_device_train_batch_size * _longest(
            train_dataset, args.max_length
        )
        self.quadratic = quadratic_weight(model.config, sum(p.numel() for p in model.parameters()))

    def cut(
        self, batches: Sequence[Documents], collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> list[Slot]:
        """One slot per padded micro-batch, all idle but the last, which holds the step's examples re-cut."""
        examples = [example for batch in batches for example in batch.examples]
        lengths = np.array([len(example["input_ids"]) for example in examples], dtype=np.int64)
        wanted = self._largest_over_ranks(fewest_micro_batches(lengths, self.budget))
        count = min(wanted, len(lengths))
        parts = recut(lengths, budget=self.budget, num_micro_batches=count, quadratic=self.quadratic)
        micro_batches = [collate([examples[i] for i in part]) for part in parts]
        # A rank with fewer documents than others have micro-batches takes part in their collectives, untrained.
        idle = {**examples[0], "labels": [-100] * int(lengths[0])}
        micro_batches += [collate([idle]) for _ in range(wanted - count)]
        return [Slot([]) for _ in batches[:-1]] + [Slot(micro_batches)]

    def _largest_over_ranks(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        counts: Any = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return int(counts.max())


def _longest(train_dataset: Any, max_length: int | None) -> int:
    """Tokens of the longest document; of a stream, the longest that it may have."""
    if not isinstance(train_dataset, IterableDataset):
        return int(read_lengths(train_dataset).max())
    if max_length is None:
        raise InvalidConfig(
            "packing_strategy='step' on a stream needs a token budget: max_length is None.",
            why=["the longest document of a stream is not known beforehand"],
            do="Set max_length or max_tokens_per_microbatch, or use packing_strategy='minibatch'.",
        )
    return max_length


def quadratic_weight(config: PreTrainedConfig, num_parameters: int) -> float:
    """Cost of a token attending to a token, in units of the cost of a token.

    Forward operations per token: 2 per parameter, and 2 * layers * width per token that it attends to (half of the
    document on average, scores and values).
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
    return text.num_hidden_layers * width / max(num_parameters, 1)
