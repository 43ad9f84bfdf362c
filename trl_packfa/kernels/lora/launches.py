"""Launches of our Triton kernels for LoRA layers on CUDA. Other devices run torch's operators.

Shape letters: T tokens, I features inside an MLP.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

_ELEMENTS = 1024  # of a program that computes element by element


@cache
def _kernels() -> Any:
    """Import the kernels, which need Triton."""
    return import_module(".triton_kernels", __package__)


def swiglu_backward(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *, overwrites: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up, and `silu(gate) * up`, from that product's gradient.

    All are `(T, I)`, contiguous and of one dtype. The product takes the memory of `grad`; `overwrites` allows the
    gradients to take that of gate and up.
    """
    grads = (gate, up) if overwrites else (torch.empty_like(gate), torch.empty_like(up))
    with torch.cuda.device_of(gate):
        grid = (-(-gate.numel() // _ELEMENTS),)
        _kernels().swiglu_backward[grid](gate, up, grad, *grads, grad, gate.numel(), _ELEMENTS)
    return *grads, grad
