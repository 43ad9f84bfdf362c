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
