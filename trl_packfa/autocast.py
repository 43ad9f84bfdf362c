"""The dtype that matrix products run in: the one that autocast sets, and those that a device supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from .compile import constant_in_graphs

HALF = (torch.bfloat16, torch.float16)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives matrix products of `x`, `None` if autocast is off."""
    device = x.device.type
    # Each device type has its own switch: autocast may be off for "cpu" while it is on for "cuda".
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_to_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors to the dtype in which autocast would multiply them; leave them unchanged if autocast is off."""
    # Autocast casts the arguments of the torch operators on its lists. Other operators (FlashAttention, our custom
    # operators, products with `out=`) get the caller's tensors unchanged.
    return tuple(tensor.to(autocast_dtype(tensor) or tensor.dtype) for tensor in tensors)


def multiplies_in_tf32(device: torch.device) -> bool:
    """Tell whether a GPU rounds the factors of float32 products to TF32, which keeps ten bits of a number, as float16
    does.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):  # Ampere is the first with TF32
        return False
    matmul: Any = torch.backends.cuda.matmul
    # torch 2.9 has a newer setting with more than two values. Once it is used, the older one cannot be read.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `backward` of a `torch.autograd.Function` multiply in the dtypes of its own tensors.

    A caller may still be under autocast when it calls `loss.backward()`. Autocast would then run some products of a
    float32 backward in half precision, and other products would fail on the mixed dtypes.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        # All gradients of one backward are on one type of device.
        device = next((grad.device.type for grad in grads if isinstance(grad, torch.Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


@constant_in_graphs
def has_half_products(dtype: torch.dtype, device: str) -> bool:
    """Tell whether a device multiplies half precision in hardware; older CPUs emulate it, more slowly than float32."""
    return device != "cpu" or _has_half_products_on_a_cpu(dtype)


@cache
def _has_half_products_on_a_cpu(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, name)())
