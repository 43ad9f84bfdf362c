"""`ShardedRowsTrainer`: TRL's `SFTTrainer` whose processes share rows in groups (`sequence_parallel`).

A group counts as one data-parallel process: all of its processes get the same batches. Here are the Trainer's hooks
that count processes. Without sharing they do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from trl import SFTTrainer

from ..config.sft import PackedSFTConfig
from ..memory import peak_memory
from .ranks import row_group
from .sequence_parallel import ShardedRowModel


class ShardedRowsTrainer(SFTTrainer):
    """TRL's `SFTTrainer` with groups of `args.sequence_parallel` processes that share each row."""

    args: PackedSFTConfig

    def get_tp_size(self) -> int:
        """Return the number of processes with the same batch. The Trainer divides counts and losses by it."""
        return super().get_tp_size() * self._size

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        found = super()._get_num_items_in_batch(batch_samples, device)
        # The Trainer divides by the number of processes with the same batch, also if it has not summed over them.
        return found if found is None or self.args.average_tokens_across_devices else found * self._size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this process's share of the operations of a batch."""
        return super().floating_point_ops(inputs) // self._size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # adds the tokens of all processes
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._size

    @property
    def _size(self) -> int:
        return self.args.sequence_parallel

    def _shared(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the model that runs a batch: for packed batches the one that the group shares."""
        group = row_group(self.args, self.accelerator)
        return model if group is None or "attention_mask" in inputs else ShardedRowModel(model, group)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics, and the peak memory of the process that shares rows and has most."""
        if self._size > 1 and "loss" in logs:
            peaks: Any = self.accelerator.gather(
                torch.tensor([peak_memory(self.args.device)], device=self.args.device)
            )
            logs["peak_memory_gb"] = float(peaks.max()) / 1e9
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's evaluation loop. Of each group it takes one process's results."""
        if self._size > 1:
            self.gather_function = self._gather_groups
        return super().evaluation_loop(*args, **kwargs)

    def _gather_groups(self, found: Any) -> Any:
        """Gather tensors of all groups, and drop what the last batch repeats, as `gather_for_metrics` does."""
        state, groups = self.accelerator.gradient_state, self.args.data_parallel_size
        true = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def first_of_each(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (groups, self._size, -1))[:, 0].flatten(0, 1)[:true]

        return recursively_apply(first_of_each, self.accelerator.gather(found))
