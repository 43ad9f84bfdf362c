"""What dtype matrix products run in: what autocast makes of them, and what a device has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from .compile import constant_in_graphs

HALF = (torch.bfloat16, torch.float16)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast turns matrix products of `x` into, if it is on."""
    device = x.device.type
    # Asked of the tensor's own device type: each has a switch of its own, and "cpu" may be off while "cuda" is on.
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_to_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors in the dtype that autocast would multiply them in; unchanged where autocast is off."""
    # Autocast casts the arguments of torch operators that are on its lists. Operators that are not (FlashAttention,
    # our custom operators, products with `out=`) get what the caller hands them.
    return tuple(tensor.to(autocast_dtype(tensor) or tensor.dtype) for tensor in tensors)


def multiplies_in_tf32(device: torch.device) -> bool:
    """Whether a GPU rounds the factors of float32 products to TF32, which keeps ten bits of a number, as float16 does.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):  # Ampere's, the first with TF32
        return False
    matmul: Any = torch.backends.cuda.matmul
    # torch 2.9 has a setting of more than two values, after which it does not tell the older one.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `torch.autograd.Function`'s `backward` that multiplies in the dtypes of its own tensors.

    A caller may still be under autocast when it calls `loss.backward()`. Autocast would then turn some of the products
    of a float32 backward into half precision, and the others would fail on the mixture.
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
    """Whether a device multiplies in half precision itself; older CPUs emulate it, more slowly than float32."""
    return device != "cpu" or _has_half_products_on_a_cpu(dtype)


@cache
def _has_half_products_on_a_cpu(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # oneDNN multiplies half precision on a CPU, and only it knows which instructions it has for that. torch has no
    # public function that asks it.
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, name)())
