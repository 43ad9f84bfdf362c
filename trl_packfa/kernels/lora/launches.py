"""Launches of our Triton kernels for LoRA layers on CUDA. Other devices run torch's operators.

Shape letters: T tokens, D input features, O output features, I features inside an MLP, R rank.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ...autocast import HALF
from ..liger import is_plain

# A larger rank makes the partial sums larger than the tensors that are not read twice.
MOST_RANKS = 32
_ELEMENTS = 1024  # of a program that computes element by element
# Tokens and features of a block that a program multiplies at once: shared memory of each GPU since Ampere holds it.
_BLOCK_T, _BLOCK_O = 32, 512
# The largest number of tokens of a program, and how many programs keep a GPU of 132 multiprocessors busy.
_TILE, _PROGRAMS = 1024, 128


@cache
def _kernels() -> Any:
    """Import the kernels, which need Triton."""
    return import_module(".triton_kernels", __package__)


@cache
def runs_on(device: torch.device) -> bool:
    """Tell whether the kernels run on a device: on CUDA since Ampere, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes(tensor: torch.Tensor, rank: int) -> bool:
    """Tell whether the kernels multiply a tensor with adapters of this rank."""
    fits = tensor.dtype in HALF and rank <= MOST_RANKS and runs_on(tensor.device)
    return fits and is_plain(tensor) and tensor.is_contiguous()


def gradient_products(
    grad_TO: torch.Tensor,
    B_OR: torch.Tensor,
    inner_TR: torch.Tensor,
    outer_TR: torch.Tensor,
    scaling: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Write `scaling * grad @ B` to `outer_TR`, and return `grad.T @ inner` `(O, R)` in a dtype, in one pass.

    [`takes`] must accept the gradient. The rows of `inner_TR` and `outer_TR` may be parts of longer ones.
    """
    (tokens, features), rank = grad_TO.shape, inner_TR.shape[1]
    tile, *shapes = product_parts(tokens, features, rank)
    parts = [grad_TO.new_empty(shape, dtype=torch.float32) for shape in shapes]
    grad_B = grad_TO.new_empty((features, rank), dtype=dtype)
    sizes = (tokens, features, rank, inner_TR.stride(0), tile, _BLOCK_T, _BLOCK_O, _padded(rank))
    counts = (*map(len, parts), tokens * rank, features * rank)
    with torch.cuda.device_of(grad_TO):
        grid = tuple(map(len, parts))
        _kernels().gradient_products[grid](grad_TO, B_OR.contiguous(), inner_TR, *parts, *sizes, num_warps=8)
        grid, options = (-(-max(counts) // _ELEMENTS), 2), (rank, outer_TR.stride(0), scaling, _ELEMENTS)
        _kernels().add_gradient_products[grid](*parts, outer_TR, grad_B, *counts, *options)
    return grad_B


def product_parts(tokens: int, features: int, rank: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a program of [`gradient_products`], and the shapes of its two partial sums."""
    columns, tile = -(-features // _BLOCK_O), _TILE
    while tile > _BLOCK_T and columns * -(-tokens // tile) < _PROGRAMS:
        tile //= 2
    return tile, (columns, tokens, rank), (-(-tokens // tile), features, rank)


def _padded(rank: int) -> int:
    """Return the ranks of a block: a power of two that a matrix product can have."""
    return max(16, 1 << (rank - 1).bit_length())


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
