"""Loading of Liger's functions, with checks of the package, its version and the functions' arguments.

https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch.autograd import Function

from ...versions import installed_version

# The oldest supported version, which added rotations of a part of the head.
OLDEST = "0.8.5"
# Dtypes of Liger's kernels, and the largest row. A row, padded to a power of two, is one block of threads.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_FEATURES = 65536
_MODULE = "liger_kernel.ops"
# Functions by name, with the arguments that are passed here. The installed functions must have these arguments.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "LigerRMSNormFunction": ("X", "W", "eps", "offset", "casting_mode", "in_place"),
    "LigerRopeFunction": ("q", "k", "cos", "sin"),
    "swiglu_forward": ("a", "b"),
    "swiglu_backward": ("a", "b", "dc"),
}


class LigerKernels(NamedTuple):
    """The functions of `liger_kernel.ops` on this machine.

    Attributes:
        version (`str`): version of the package.
        rms_norm (`type[Function]`): RMSNorm of `(..., D)`.
        rope (`type[Function]`): rotation of queries and keys `(B, heads, L, H)`, which overwrites them.
        swiglu_forward (`Callable`): maps `(gate, up)`, `(T, I)` each, to both and `silu(gate) * up`.
        swiglu_backward (`Callable`): maps `(gate, up, gradient)` to the gradients and overwrites `gate` and `up`.
    """

    version: str
    rms_norm: type[Function]
    rope: type[Function]
    swiglu_forward: Callable[..., Any]
    swiglu_backward: Callable[..., Any]


def liger_kernels() -> LigerKernels | None:
    """Return Liger's functions, or `None` if they cannot be used ([`liger_unavailable`] says why)."""
    found = _loaded()
    return None if isinstance(found, str) else found


def liger_unavailable() -> str | None:
    """Return the reason why Liger's kernels cannot be used, `None` if they can."""
    found = _loaded()
    return found if isinstance(found, str) else None


@cache
def _loaded() -> LigerKernels | str:
    return _load()


def _load() -> LigerKernels | str:
    version = installed_version("liger-kernel")
    if version is None:
        return "liger-kernel is not installed: pip install 'trl-packfa[kernels]'"
    if Version(version) < Version(OLDEST):
        return f"liger-kernel {version} is older than {OLDEST}"
    try:
        ops = import_module(_MODULE)
        functions = {name: getattr(ops, name) for name in _FUNCTIONS}
    except Exception as error:  # a broken Triton may raise any error
        return f"liger-kernel {version} cannot be imported: {type(error).__name__}: {error}"
    for name, wanted in _FUNCTIONS.items():
        taken = _arguments(functions[name])
        if taken[: len(wanted)] != wanted:
            return f"liger-kernel {version}: {name} takes {taken}, not {wanted}"
    return LigerKernels(version, *functions.values())


def _arguments(function: Any) -> tuple[str, ...]:
    if isinstance(function, type):  # an autograd function, whose first argument is its context
        return tuple(inspect.signature(function.forward).parameters)[1:]  # type: ignore[attr-defined]
    return tuple(inspect.signature(function).parameters)


def lies_on_cuda(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is on CUDA, where the kernels run."""
    return tensor.device.type == "cuda"


def takes(*tensors: torch.Tensor) -> bool:
    """Tell whether Liger's kernels accept these tensors together.

    They must be contiguous, on CUDA, of one supported dtype, and with rows of at most `MOST_FEATURES`.
    """
    first = tensors[0]
    return first.dtype in DTYPES and all(
        type(x.data) is torch.Tensor  # a DTensor holds only a part of the data
        and lies_on_cuda(x)
        and x.dtype == first.dtype
        and x.shape[-1] <= MOST_FEATURES
        and x.is_contiguous()
        for x in tensors
    )
