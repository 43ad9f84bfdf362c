"""Which functions of Liger's can be called: the package, its version, and what its functions take.

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

# The oldest version that was read and compiled; rotations of a part of the head came with it.
OLDEST = "0.8.5"
# What its kernels are compiled for. A row, padded to a power of two, is one block of threads.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_FEATURES = 65536
_MODULE = "liger_kernel.ops"
# By name, whose arguments are looked at, and the ones that are passed here.
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "LigerRMSNormFunction": ("X", "W", "eps", "offset", "casting_mode", "in_place"),
    "LigerRopeFunction": ("q", "k", "cos", "sin"),
    "swiglu_forward": ("a", "b"),
    "swiglu_backward": ("a", "b", "dc"),
}


class LigerKernels(NamedTuple):
    """Liger's functions, as `liger_kernel.ops` has them for this machine.

    Attributes:
        version (`str`): of the package.
        rms_norm (`type[Function]`): RMSNorm of `(..., D)`.
        rope (`type[Function]`): rotation of queries and keys `(B, heads, L, H)`, which writes over them.
        swiglu_forward (`Callable`): `(gate, up)`, `(T, I)` each, to both and `silu(gate) * up`.
        swiglu_backward (`Callable`): `(gate, up, gradient)` to the gradients, written over `gate` and `up`.
    """

    version: str
    rms_norm: type[Function]
    rope: type[Function]
    swiglu_forward: Callable[..., Any]
    swiglu_backward: Callable[..., Any]


def liger_kernels() -> LigerKernels | None:
    """Liger's functions, `None` where [`liger_unavailable`] says why."""
    found = _loaded()
    return None if isinstance(found, str) else found


def liger_unavailable() -> str | None:
    """Why Liger's kernels are not used, `None` if they can be."""
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
    except Exception as error:  # a broken Triton raises what it likes
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
    """Whether a tensor lies where the kernels run."""
    return tensor.device.type == "cuda"


def takes(*tensors: torch.Tensor) -> bool:
    """Whether Liger's kernels take these tensors together: on CUDA, of one dtype that they have, rows not too wide and
    without gaps."""
    first = tensors[0]
    return first.dtype in DTYPES and all(
        type(x.data) is torch.Tensor  # no part of one, as DTensor is
        and lies_on_cuda(x)
        and x.dtype == first.dtype
        and x.shape[-1] <= MOST_FEATURES
        and x.is_contiguous()
        for x in tensors
    )
