"""Half-precision products of the check, on a CPU without instructions for them: computed in float32 and rounded once.

There torch multiplies half precision up to a hundred times more slowly than float32, and a check would take minutes.
These products treat every token by itself. All other code runs as in training.
"""

from __future__ import annotations

import threading
import warnings
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
# Most numbers of weights that are kept in float32 (1 GiB). Converting them for each product takes a third of a check.
_KEPT = 2**28


class _InFloat32:
    """A replacement of torch's matrix products on the CPU inside a `with` block.

    The kernels are replaced. A `TorchDispatchMode` would see every other operator too, a seventh of a check's time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        matrices = [p for p in parameters if p.dtype in HALF and p.dim() == 2 and p.is_contiguous()]
        kept = matrices if sum(p.numel() for p in matrices) <= _KEPT else []
        # While the parameters live, nothing else gets their addresses.
        self._matrices = {matrix.data_ptr(): matrix for matrix in kept}
        self._wide: dict[int, tuple[int, torch.Tensor]] = {}  # a weight's version and conversion, by address
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

    def _multiply(self, product: Any, *operands: torch.Tensor, **factors: Any) -> torch.Tensor:
        """Multiply the last two operands and add the first, if there are three, with a kernel that is not replaced."""
        left, right = operands[-2:]
        dtype, shape = right.dtype, (*left.shape[:-1], right.shape[-1])
        # Without tokens, do not convert the LM head.
        elsewhere = threading.get_ident() != self._thread  # another thread may train meanwhile: as without the check
        if elsewhere or dtype not in HALF or has_half_products(dtype, "cpu") or not left.numel():
            return product(*operands, **factors, out=right.new_empty(shape))
        wide = [self._widened(operand) for operand in operands]
        return product(*wide, **factors, out=wide[-1].new_empty(shape)).to(dtype)

    def _widened(self, operand: torch.Tensor) -> torch.Tensor:
        """Return an operand in float32; a weight, or its transpose, is converted once."""
        address = operand.data_ptr()
        matrix = self._matrices.get(address)
        if matrix is None or matrix.data_ptr() != address:
            return operand.float()
        if self._wide.get(address, (None,))[0] != matrix._version:
            self._wide[address] = matrix._version, matrix.float()
        wide = self._wide[address][1]
        for own, found in ((matrix, wide), (matrix.t(), wide.t())):
            if (operand.shape, operand.stride(), operand.dtype) == (own.shape, own.stride(), own.dtype):
                return found
        return operand.float()  # a part of a weight


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
