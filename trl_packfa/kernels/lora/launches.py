"""Launches of our Triton kernels for LoRA layers on CUDA. Other devices run torch's operators.

Shape letters: T tokens, D input features, O output features, I features inside an MLP, R rank.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from ...autocast import HALF
from .. import devices
from ..liger import is_plain

# A larger rank makes the partial sums larger than the tensors that are not read twice.
MOST_RANKS = 32
MOST_LAYERS = 3  # with one input, that have dropout: queries, keys and values
_ELEMENTS = 1024  # of a program that computes element by element
# Tokens and features of a block that a program multiplies at once: shared memory of each GPU since Ampere holds it.
_BLOCK_T, _BLOCK_O = 32, 512
# Features of a block of an input with dropout.
_BLOCK_D = 128
# The largest number of tokens of a program, and how many programs keep a GPU of 132 multiprocessors busy.
_TILE, _PROGRAMS = 1024, 128


@cache
def _kernels() -> Any:
    """Import the kernels, which need Triton."""
    return import_module(".triton_kernels", __package__)


@cache
def runs_on(device: torch.device) -> bool:
    """Tell whether the kernels run on a device: on CUDA since Ampere, with Triton."""
    if torch.version.hip is not None or not devices.runs_triton(device):
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
    tensors, stages = (grad_TO, B_OR.contiguous(), inner_TR, *parts), {"num_warps": 8, "num_stages": 2}
    sums = (rank, outer_TR.stride(0), scaling, _ELEMENTS)
    with torch.cuda.device_of(grad_TO):
        _kernels().gradient_products[tuple(map(len, parts))](*tensors, *sizes, **stages)
        grid = (-(-max(counts) // _ELEMENTS), 2)
        _kernels().add_gradient_products[grid](*parts, outer_TR, grad_B, *counts, *sums)
    return grad_B


def product_parts(tokens: int, features: int, rank: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a program of [`gradient_products`], and the shapes of its two partial sums."""
    columns = -(-features // _BLOCK_O)
    tile = _tile(tokens, columns)
    return tile, (columns, tokens, rank), (-(-tokens // tile), features, rank)


def _tile(tokens: int, columns: int) -> int:
    """Return the tokens of a program, so that there are enough programs in this many columns."""
    tile = _TILE
    while tile > _BLOCK_T and columns * -(-tokens // tile) < _PROGRAMS:
        tile //= 2
    return tile


def draw_bits(seed: torch.Tensor, layers: int, tokens: int, features: int, rate: float) -> torch.Tensor:
    """Draw dropout masks from a seed `(1,)`, int64: `(layers, T, D / 32)` int32, a bit of one for each kept feature.

    The rate is exact to 1 / 65536.
    """
    bits = torch.empty((layers, tokens, -(-features // 32)), dtype=torch.int32, device=seed.device)
    count, threshold = bits[0].numel(), min(max(round((1 - rate) * 2**16), 1), 2**16 - 1)
    with torch.cuda.device_of(seed):
        _kernels().draw_bits[(-(-count // _ELEMENTS), layers)](seed, bits, count, threshold, _ELEMENTS)
    return bits


def all_bits(layers: int, tokens: int, features: int, device: torch.device) -> torch.Tensor:
    """Return the bits of masks that keep every feature, as [`draw_bits`] does."""
    return torch.full((layers, tokens, -(-features // 32)), -1, dtype=torch.int32, device=device)


def dropped_inner(x_TD: torch.Tensor, A_RD: torch.Tensor, bits: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the scaled products `(T, R)` of an input, with each layer's dropout, with its part of `lora_A`."""
    inner_TR = x_TD.new_empty(len(x_TD), len(A_RD))
    sizes, blocks = _dropped(x_TD, A_RD, bits)
    with torch.cuda.device_of(x_TD):
        tensors = (x_TD.contiguous(), A_RD.contiguous(), bits, inner_TR)
        _kernels().dropped_inner[(-(-len(x_TD) // _BLOCK_T),)](*tensors, *sizes, scaling, *blocks)
    return inner_TR


def dropped_grad_A(outer_TR: torch.Tensor, x_TD: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return the product `(R, D)` of `outer_TR`, transposed, with an input with each layer's dropout, in float32."""
    tokens, features = x_TD.shape
    columns, rows, tile = grad_A_parts(tokens, features)
    parts = x_TD.new_empty((rows, outer_TR.shape[1], features), dtype=torch.float32)
    sizes, blocks = _dropped(x_TD, outer_TR.T, bits)
    with torch.cuda.device_of(x_TD):
        tensors = (outer_TR.contiguous(), x_TD.contiguous(), bits, parts)
        _kernels().dropped_grad_A[(columns, rows)](*tensors, *sizes, tile, *blocks)
    return parts.sum(0)


def grad_A_parts(tokens: int, features: int) -> tuple[int, int, int]:
    """Return the columns and rows of programs of [`dropped_grad_A`], a row to each partial sum, and a row's tokens."""
    columns = -(-features // _BLOCK_D)
    tile = _tile(tokens, columns)
    return columns, -(-tokens // tile), tile


def dropped_grad_x(outer_TR: torch.Tensor, A_RD: torch.Tensor, bits: torch.Tensor, out_TD: torch.Tensor) -> None:
    """Write the sum over layers of `outer @ lora_A`, with each layer's dropout, to `out_TD`, which is contiguous."""
    sizes, blocks = _dropped(out_TD, A_RD, bits)
    grid = tuple(-(-length // block) for length, block in zip(out_TD.shape, (_BLOCK_T, _BLOCK_D), strict=True))
    with torch.cuda.device_of(out_TD):
        tensors = (outer_TR.contiguous(), A_RD.contiguous(), bits, out_TD)
        _kernels().dropped_grad_x[grid](*tensors, *sizes, *blocks)


def _dropped(x_TD: torch.Tensor, A_RD: torch.Tensor, bits: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of tensors with dropout, and of the blocks."""
    layers, rank = len(bits), len(A_RD) // len(bits)
    return (*x_TD.shape, bits.shape[2], bits.stride(0), rank), (layers, _BLOCK_T, _BLOCK_D, _padded(rank))


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
