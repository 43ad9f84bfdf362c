"""Half-precision products of the proof on a CPU that has no instructions for them: in float32, rounded once.

torch multiplies half precision there up to a hundred times as slowly as float32, and a proof would take minutes. Such
products treat every token by itself. All other code runs as it trains.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.autocast import HALF, has_half_products

_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))


class _InFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[-1].dtype not in HALF or has_half_products(args[-1].dtype, "cpu"):
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return func(*wide, **kwargs).to(args[-1].dtype)


def fast_half_products(model: nn.Module) -> AbstractContextManager[Any]:
    """In a `with` block half precision is multiplied in float32 where the model lies on a CPU that emulates it."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    emulates = not all(has_half_products(dtype, "cpu") for dtype in HALF)
    return _InFloat32() if on_cpu and emulates else nullcontext()
