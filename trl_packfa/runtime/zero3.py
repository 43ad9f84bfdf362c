"""Models whose weights DeepSpeed ZeRO-3 keeps in parts, one on each rank.

A weight is whole only while the modules that use it run, which DeepSpeed's hooks on them see to; in between it is an
empty tensor that knows its shape (`ds_shape`). The hooks are the engine's: such a model runs through its engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from ..errors import UnsupportedModel


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of a parameter, whether it is in parts or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_size(parameter: torch.Tensor) -> int:
    """Number of elements of a parameter, whether it is in parts or not."""
    return math.prod(whole_shape(parameter))


def is_in_parts(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of a parameter only."""
    return hasattr(parameter, "ds_shape")


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 keeps this model, or the model of this engine, in parts."""
    return any(map(is_in_parts, model.parameters()))


class GradientParts:
    """Takes each gradient as it is made, and keeps this rank's part of it: every `world`th element.

    All ranks make the same gradients here, so that the parts need not be added up. Whole ones may not fit.

    Args:
        parameters (`Sequence[torch.nn.Parameter]`): those whose gradients are taken, and removed from `.grad`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self._parameters = parameters
        self._parts: dict[nn.Parameter, torch.Tensor] = {}
        self._handles = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters]

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        # Rank 1 of 2 keeps elements 1, 3, 5, ... Taken as each gradient is complete, and the whole one freed: only one
        # parameter's gradient is whole at a time.
        part = parameter.grad.flatten()[self._rank :: self._world]
        before, parameter.grad = self._parts.get(parameter), None
        self._parts[parameter] = part.clone() if before is None else before.add_(part)

    def clear(self) -> None:
        """Forget what was added up."""
        self._parts.clear()

    def norms(self) -> list[float]:
        """L2 norm of each parameter's gradient, 0 where there was none, on every rank alike."""
        parts = [self._parts.get(parameter) for parameter in self._parameters]
        squares = [0.0 if part is None else float(part.double().square().sum()) for part in parts]
        # The parts are disjoint, so the squares of their norms add up over ranks.
        total = torch.tensor(squares, dtype=torch.float64, device=self._device)
        distributed.all_reduce(total)
        return total.sqrt().tolist()

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._parameters), torch.device("cpu"))

    def close(self) -> None:
        """Let gradients go where they went before."""
        for handle in self._handles:
            handle.remove()
        self.clear()


@contextmanager
def gradients_taken(model: Any) -> Iterator[GradientParts | None]:
    """Backward passes through a ZeRO-3 engine that leave its own gradients as they were; `None` for other models.

    Raises:
        [`UnsupportedModel`]: if the model is in parts and is not the engine, or the engine is too old.
    """
    if not is_partitioned(model):
        yield None
        return
    if not hasattr(model, "zero_optimization_partition_weights"):
        raise UnsupportedModel(
            f"the weights of {type(model).__name__} are in parts (DeepSpeed ZeRO-3), and it has no engine around it.",
            why=["only DeepSpeed's engine makes a weight whole where it is used"],
            do="Pass the engine: trainer.model_wrapped, once training has begun.",
        )
    # The engine's own way to leave gradients alone until its end, where it finds none to reduce.
    with model.coalesce_grad_reduction():
        taken = GradientParts([parameter for parameter in model.parameters() if parameter.requires_grad])
        try:
            yield taken
        finally:
            taken.close()
    # The first backward of training replaces what the optimizer has gathered, as it does after a step.
    model.optimizer.zero_grad()
