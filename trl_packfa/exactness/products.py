"""Half-precision products of the proof, on a CPU without instructions for them: computed in float32 and rounded once.

There torch multiplies half precision up to a hundred times more slowly than float32, and a proof would take minutes.
These products treat every token by itself. All other code runs as in training.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.autocast import HALF, has_half_products
from ..runtime.zero3 import whole_size
from .depth import CHEAP

_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))


class _InFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[-1].dtype not in HALF or has_half_products(args[-1].dtype, "cpu"):
            return func(*args, **kwargs)
        if not args[-2].numel():  # without tokens, do not convert the LM head
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return func(*wide, **kwargs).to(args[-1].dtype)


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
    return _InFloat32() if on_cpu and large and emulated else nullcontext()
