"""Half-precision products of the check, on a CPU without instructions for them: computed in float32 and rounded once.

There torch multiplies half precision up to a hundred times more slowly than float32, and a check would take minutes.
These products treat every token by itself. All other code runs as in training.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..autocast import HALF, has_half_products
from ..parallel.zero3 import whole_size
from .depth import CHEAP

# Each product and its variant that writes into a tensor. The variant is not replaced, so it computes the replacement.
_PRODUCTS = {name: getattr(torch.ops.aten, name).out for name in ("mm", "addmm", "bmm", "baddbmm")}
# Most numbers of weights that are kept in float32 (1 GiB). Converting them for each product takes a fifth of a check.
_KEPT = 2**28
# Operands that are remembered beside the weights.
_RECENT = 3


class _Wide:
    """A tensor and its conversion to float32. While this holds the tensor, nothing else gets its address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.wide = tensor, tensor._version, tensor.float()

    def find(self, operand: torch.Tensor) -> torch.Tensor | None:
        """Return the conversion of an operand that is this tensor or its transpose, `None` of any other."""
        own = self.tensor
        is_same = operand.data_ptr() == own.data_ptr() and operand.dtype is own.dtype
        if not is_same or own._version != self.version:
            return None
        if operand.shape == own.shape and operand.stride() == own.stride():
            return self.wide
        if own.dim() == 2 and operand.shape == own.shape[::-1] and operand.stride() == own.stride()[::-1]:
            return self.wide.t()
        return None


class _InFloat32:
    """A replacement of torch's matrix products on the CPU inside a `with` block.

    The kernels are replaced. A `TorchDispatchMode` would see every other operator too, a seventh of a check's time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        matrices = [p for p in parameters if p.dtype in HALF and p.dim() == 2 and p.is_contiguous()]
        kept = matrices if sum(p.numel() for p in matrices) <= _KEPT else []
        self._matrices = {matrix.data_ptr(): matrix for matrix in kept}
        self._wide: dict[int, _Wide] = {}
        # Several layers multiply the same activations, and a backward pass multiplies each gradient twice.
        self._recent: deque[_Wide] = deque(maxlen=_RECENT)
        # Holds each product until it is rounded. New memory for an LM head's gradient costs more than the product.
        self._result = torch.empty(0)
        self._kernels: torch.library.Library | None = None
        self._thread = 0

    def __enter__(self) -> _InFloat32:
        self._kernels, self._thread = torch.library.Library("aten", "IMPL", "CPU"), threading.get_ident()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
            for name, product in _PRODUCTS.items():
                self._kernels.impl(name, partial(self._multiply, product))
        return self

    def __exit__(self, *error: object) -> None:
        self._kernels = None  # torch's kernels come back when the library is deleted
        self._wide.clear()
        self._recent.clear()
        self._result = torch.empty(0)

    def _multiply(self, product: Any, *operands: torch.Tensor, **factors: Any) -> torch.Tensor:
        """Multiply the last two operands and add the first, if there are three, with a kernel that is not replaced."""
        left, right = operands[-2:]
        shape = (*left.shape[:-1], right.shape[-1])
        dtype = right.dtype
        # Without tokens, do not convert the LM head.
        elsewhere = threading.get_ident() != self._thread  # another thread may train meanwhile: as without the check
        if elsewhere or dtype not in HALF or has_half_products(dtype, "cpu") or not left.numel():
            return product(*operands, **factors, out=right.new_empty(shape))
        wide = [self._widened(operand) for operand in operands]
        size = math.prod(shape)
        if size > len(self._result):
            self._result = wide[-1].new_empty(size)
        return product(*wide, **factors, out=self._result[:size].view(shape)).to(dtype)

    def _widened(self, operand: torch.Tensor) -> torch.Tensor:
        """Return an operand in float32; a weight, or its transpose, is converted once."""
        address = operand.data_ptr()
        matrix = self._matrices.get(address)
        if matrix is not None:
            if address not in self._wide or self._wide[address].find(matrix) is None:
                self._wide[address] = _Wide(matrix)
            found = self._wide[address].find(operand)
            return operand.float() if found is None else found  # a part of a weight is not kept
        for wide in self._recent:
            if (found := wide.find(operand)) is not None:
                return found
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
    # A kernel in Python costs more than the products of a small model.
    emulated = any(dtype in HALF and not has_half_products(dtype, "cpu") for dtype in dtypes)
    return _InFloat32(parameters) if on_cpu and large and emulated else nullcontext()
