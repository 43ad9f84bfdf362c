"""Support for models whose weights DeepSpeed ZeRO-3 splits over the ranks.

A weight is whole only while a module that uses it runs; DeepSpeed's hooks on the modules gather it. At other times it
is an empty tensor that knows its shape (`ds_shape`). The hooks belong to the engine, so such a model runs through its
engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from ..errors import UnsupportedModel
from ..layout.shard import RowShard


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, whether it is split or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_size(parameter: torch.Tensor) -> int:
    """Return the number of elements of a parameter, whether it is split or not."""
    return math.prod(whole_shape(parameter))


def is_in_parts(parameter: torch.Tensor) -> bool:
    """Tell whether this rank holds only a part of a parameter."""
    return hasattr(parameter, "ds_shape")


def is_partitioned(model: nn.Module) -> bool:
    """Tell whether ZeRO-3 splits the weights of this model, or of the model of this engine."""
    return any(map(is_in_parts, model.parameters()))


def is_engine(model: nn.Module) -> bool:
    """Tell whether a model is DeepSpeed's engine."""
    return hasattr(model, "zero_optimization_partition_weights")


class GradientParts:
    """Collector of gradients that keeps this rank's part of each: every `world`th element.

    All ranks make the same gradients here, so the parts need not be added up over ranks. Gradients of ranks that share
    a row (`shard`) differ, and their mean is taken. Whole gradients may not fit into memory: they are removed from
    `.grad`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shard: RowShard | None = None) -> None:
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self._shard = shard
        self._parameters = parameters
        self._parts: dict[nn.Parameter, torch.Tensor] = {}
        self._handles = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters]

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if self._shard is not None:
            self._shard.average(parameter.grad)
        # Rank 1 of 2 keeps elements 1, 3, 5, ... Each gradient is taken as soon as it is complete, and then freed, so
        # that only one parameter's gradient is whole at a time.
        part = parameter.grad.flatten()[self._rank :: self._world]
        before, parameter.grad = self._parts.get(parameter), None
        self._parts[parameter] = part.clone() if before is None else before.add_(part)

    def clear(self) -> None:
        """Delete the gradients that were added up."""
        self._parts.clear()

    def norms(self) -> list[float]:
        """Return the L2 norm of each parameter's gradient, 0 if it has none; all ranks get the same."""
        parts = [self._parts.get(parameter) for parameter in self._parameters]
        squares = [0.0 if part is None else float(part.double().square().sum()) for part in parts]
        # The parts are disjoint, so the squares of their norms add up over ranks.
        device = next((parameter.device for parameter in self._parameters), torch.device("cpu"))
        total = torch.tensor(squares, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return total.sqrt().tolist()

    def close(self) -> None:
        """Remove the hooks, so that gradients stay in `.grad` again."""
        for handle in self._handles:
            handle.remove()
        self.clear()


@contextmanager
def gradients_taken(model: Any, shard: RowShard | None = None) -> Iterator[GradientParts | None]:
    """Take the gradients of backward passes through a ZeRO-3 engine, inside a `with` block; `None` for other models.

    The engine's own gradients stay as they were. `shard` is that of [`GradientParts`]. Raise [`UnsupportedModel`] if
    the model's weights are split and it is not the engine, or the engine is too old.
    """
    if not is_partitioned(model):
        yield None
        return
    if not is_engine(model):
        raise UnsupportedModel(
            f"the weights of {type(model).__name__} are split (DeepSpeed ZeRO-3), and it has no engine around it.",
            why=["only DeepSpeed's engine gathers a weight when it is used"],
            do="Pass the engine: trainer.model_wrapped, once training has begun.",
        )
    # Inside this block the engine does not reduce gradients. At its end there are none left to reduce.
    with model.coalesce_grad_reduction():
        taken = GradientParts([parameter for parameter in model.parameters() if parameter.requires_grad], shard)
        try:
            yield taken
        finally:
            taken.close()
    # Clear the gradients that the optimizer has collected: the first backward of training replaces them.
    model.optimizer.zero_grad()
