"""Triton kernels for LoRA layers on CUDA. Only `launches.py` imports this module, where Triton is installed.

Arguments are pointers to contiguous tensors, unless a stride is an argument too. Kernels compute in float32.

https://triton-lang.org

Shape letters: T tokens, I features inside an MLP.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def swiglu_backward(
    gate: tl.tensor,
    up: tl.tensor,
    grad: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    product: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradients of gate and up, and `silu(gate) * up`, from the gradient of that product.

    All have `count` elements. Results may lie in the memory of arguments.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    gates = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    grads = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    silu = gates * sigmoid
    # Rounded twice, as the forward rounds it.
    products = silu.to(product.dtype.element_ty).to(tl.float32) * ups
    tl.store(grad_gate + offsets, grads * ups * (silu * (1 - sigmoid) + sigmoid), mask=inside)
    tl.store(grad_up + offsets, grads * silu, mask=inside)
    tl.store(product + offsets, products, mask=inside)


@triton.jit
def gradient_products(
    grad: tl.tensor,
    lora_B: tl.tensor,
    inner: tl.tensor,
    outer_parts: tl.tensor,
    grad_B_parts: tl.tensor,
    tokens: tl.tensor,
    features: tl.tensor,
    rank: tl.tensor,
    inner_stride: tl.tensor,
    tile: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Multiply a gradient `(T, O)` with `lora_B` `(O, R)`, and its transpose with `inner` `(T, R)`, in one pass.

    A program has BLOCK_O features of `tile` tokens. It writes its part of both sums, `(O / BLOCK_O, T, R)` and
    `(T / tile, O, R)`, so that they can be added up in a fixed order. The rows of `inner` are `inner_stride` apart.
    """
    column, row = tl.program_id(0), tl.program_id(1)
    o = column * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.arange(0, RANKS)
    inside_O, inside_R = (o < features)[:, None], (r < rank)[None, :]
    at_OR = o[:, None] * rank + r[None, :]
    B_OR = tl.load(lora_B + at_OR, mask=inside_O & inside_R, other=0.0)
    grad_B_OR = tl.zeros((BLOCK_O, RANKS), tl.float32)
    outer_parts += column.to(tl.int64) * tokens * rank
    for first in range(row * tile, min(row * tile + tile, tokens), BLOCK_T):
        t = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside_T = (t < tokens)[:, None]
        inside_TO = inside_T & (o < features)[None, :]
        grad_TO = tl.load(grad + t[:, None] * features + o[None, :], mask=inside_TO, other=0.0)
        inner_TR = tl.load(inner + t[:, None] * inner_stride + r[None, :], mask=inside_T & inside_R, other=0.0)
        outer_TR = tl.dot(grad_TO, B_OR)
        tl.store(outer_parts + t[:, None] * rank + r[None, :], outer_TR, mask=inside_T & inside_R)
        grad_B_OR = tl.dot(tl.trans(grad_TO), inner_TR, grad_B_OR)
    grad_B_parts += row.to(tl.int64) * features * rank
    tl.store(grad_B_parts + at_OR, grad_B_OR, mask=inside_O & inside_R)


@triton.jit
def _add_up(parts: tl.tensor, number: tl.tensor, count: tl.tensor, n: tl.tensor) -> tl.tensor:
    """Return the elements `n` of the sum of `number` parts of `count` elements each, added in order."""
    total = tl.zeros(n.shape, tl.float32)
    for _ in range(number):
        total += tl.load(parts + n, mask=n < count, other=0.0)
        parts += count
    return total


@triton.jit
def add_gradient_products(
    outer_parts: tl.tensor,
    grad_B_parts: tl.tensor,
    outer: tl.tensor,
    grad_B: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    outer_count: tl.tensor,
    grad_B_count: tl.tensor,
    rank: tl.tensor,
    stride: tl.tensor,
    scaling: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add up the parts that [`gradient_products`] wrote in `columns` and `rows`: `outer` `(T, R)`, and `grad_B`.

    `outer` is multiplied by `scaling`, and its rows are `stride` apart.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        total = _add_up(outer_parts, columns, outer_count, n) * scaling
        tl.store(outer + (n // rank).to(tl.int64) * stride + n % rank, total, mask=n < outer_count)
    else:
        tl.store(grad_B + n, _add_up(grad_B_parts, rows, grad_B_count, n), mask=n < grad_B_count)
