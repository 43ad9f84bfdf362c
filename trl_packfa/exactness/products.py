"""Half-precision products of the proof, on a CPU without instructions for them: computed in float32 and rounded once.

There torch multiplies half precision up to a hundred times more slowly than float32, and a proof would take minutes.
These products treat every token by itself. All other code runs as in training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.autocast import HALF, has_half_products
from ..runtime.zero3 import whole_size
from .depth import CHEAP

_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))


# Most numbers of weights that are kept in float32 (1 GiB). Converting them for each product takes a fifth of a proof.
_KEPT = 2**28


# Operands that are remembered beside the weights.
_RECENT = 3


class _Wide:
    """A tensor and its conversion to float32. While this holds the tensor, nothing else gets its address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.wide = tensor, tensor._version, tensor.float()

    @property
    def is_old(self) -> bool:
        """Tell whether the tensor has changed since."""
        return self.tensor._version != self.version

    def find(self, operand: torch.Tensor) -> torch.Tensor | None:
        """Return the conversion of an operand that is this tensor or its transpose, `None` of any other."""
        own = self.tensor
        if operand.data_ptr() != own.data_ptr() or operand.dtype is not own.dtype or self.is_old:
            return None
        if operand.shape == own.shape and operand.stride() == own.stride():
            return self.wide
        if own.dim() == 2 and operand.shape == own.shape[::-1] and operand.stride() == own.stride()[::-1]:
            return self.wide.t()
        return None


class _InFloat32(TorchDispatchMode):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        matrices = [p for p in parameters if p.dtype in HALF and p.dim() == 2 and p.is_contiguous()]
        kept = matrices if sum(p.numel() for p in matrices) <= _KEPT else []
        self._matrices = {matrix.data_ptr(): matrix for matrix in kept}
        self._wide: dict[int, _Wide] = {}
        # Several layers multiply the same activations, and a backward pass multiplies each gradient twice.
        self._recent: deque[_Wide] = deque(maxlen=_RECENT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[-1].dtype not in HALF or has_half_products(args[-1].dtype, "cpu"):
            return func(*args, **kwargs)
        if not args[-2].numel():  # without tokens, do not convert the LM head
            return func(*args, **kwargs)
        wide = [self._widened(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return func(*wide, **kwargs).to(args[-1].dtype)

    def _widened(self, operand: torch.Tensor) -> torch.Tensor:
        """Return an operand in float32; a weight, or its transpose, is converted once."""
        address = operand.data_ptr()
        matrix = self._matrices.get(address)
        if matrix is not None and (address not in self._wide or self._wide[address].is_old):
            self._wide[address] = _Wide(matrix)
        known = [*self._recent] if matrix is None else [self._wide[address]]
        for wide in known:
            if (found := wide.find(operand)) is not None:
                return found
        if matrix is not None:  # a part of a weight
            return operand.float()
        self._recent.append(_Wide(operand))
        return self._recent[-1].wide


def fast_half_products(model: nn.Module) -> AbstractContextManager[Any]:
    """Multiply half precision in float32 inside a `with` block, if a large model lies on a CPU that emulates it."""
    parameters = list(model.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    large = sum(whole_size(parameter) for parameter in parameters) > CHEAP
    dtypes = {parameter.dtype for parameter in parameters}
    if torch.is_autocast_enabled("cpu"):
        dtypes.add(torch.get_autocast_dtype("cpu"))
    # The mode sees every operator, which costs more than the products of a small model.
    emulated = any(dtype in HALF and not has_half_products(dtype, "cpu") for dtype in dtypes)
    return _InFloat32(parameters) if on_cpu and large and emulated else nullcontext()
