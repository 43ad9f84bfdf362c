# type: ignore
# The above is for type checkers: Triton compiles these functions, and gives ranges and numbers other types.
"""Triton kernels for LoRA layers on CUDA. Only `launches.py` imports this module, where Triton is installed.

Arguments are pointers to contiguous tensors, unless a stride is an argument too. Kernels compute in float32.

https://triton-lang.org

Shape letters: T tokens, I features inside an MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


# A threshold of one would be a constant, which is no tensor.
@triton.jit(do_not_specialize=["threshold"])
def draw_bits(seed: tl.tensor, bits: tl.tensor, count: tl.tensor, threshold: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Draw `count` words of each layer, program by program. A bit is one with probability `threshold / 65536`.

    Sixteen random words and as many binary digits of the threshold, from the lowest on, make 32 such bits at once: a
    digit of one joins a random word by "or" (`p` becomes `p / 2 + 1 / 2`), a digit of zero by "and" (`p / 2`).
    """
    n, layer = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    key = tl.load(seed)
    keep = tl.zeros((BLOCK,), tl.uint32)
    for call in tl.static_range(4):
        # Seven rounds are the fewest that pass the tests of Philox's authors (Salmon et al., 2011).
        one, two, three, four = tl.philox(key, n, n * 0 + layer, n * 0 + call, n * 0, 7)
        keep = _join(keep, one, threshold >> (4 * call))
        keep = _join(keep, two, threshold >> (4 * call + 1))
        keep = _join(keep, three, threshold >> (4 * call + 2))
        keep = _join(keep, four, threshold >> (4 * call + 3))
    tl.store(bits + layer.to(tl.int64) * count + n, keep.to(tl.int32, bitcast=True), mask=n < count)


@triton.jit
def _join(keep: tl.tensor, number: tl.tensor, digits: tl.tensor) -> tl.tensor:
    """Return `keep | number` if the lowest digit is one, else `keep & number`."""
    all_ones = (0 - (digits & 1)).to(tl.uint32, bitcast=True)
    return (keep & number) | (all_ones & (keep | number))


@triton.jit
def _is_kept(
    bits: tl.tensor, t: tl.tensor, first: tl.tensor, tokens: tl.tensor, words: tl.tensor, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Tell which elements of a block `(T, D)` a layer's bits keep. It has the BLOCK_D features from `first` on."""
    w = first // 32 + tl.arange(0, BLOCK_D // 32)
    inside = (t < tokens)[:, None] & (w < words)[None, :]
    word_TW = tl.load(bits + t[:, None] * words + w[None, :], mask=inside, other=0)
    kept = (word_TW[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(kept.to(tl.int8), (t.shape[0], BLOCK_D)) != 0


@triton.jit
def _add_inner(
    total: tl.tensor, x_TD: tl.tensor, kept: tl.tensor, lora_A: tl.tensor, r: tl.tensor, d: tl.tensor,
    rank: tl.tensor, features: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Add a block's product with a layer's `lora_A` to `(T, R)`."""
    inside = (d < features)[:, None] & (r < rank)[None, :]
    A_DR = tl.load(lora_A + r[None, :] * features + d[:, None], mask=inside, other=0.0)
    return tl.dot(tl.where(kept, x_TD, 0.0).to(x_TD.dtype), A_DR, total)


@triton.jit
def dropped_inner(
    x: tl.tensor,
    lora_A: tl.tensor,
    bits: tl.tensor,
    inner: tl.tensor,
    tokens: tl.tensor,
    features: tl.tensor,
    words: tl.tensor,
    layer_words: tl.tensor,
    rank: tl.tensor,
    scaling: tl.tensor,
    LAYERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Multiply an input `(T, D)`, with each layer's dropout, with its `lora_A` `(R, D)`, for up to three layers.

    `inner` has the ranks of a layer after those of the layer before. The bits of layers are `layer_words` apart.
    """
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    r = tl.arange(0, RANKS)
    one = tl.zeros((BLOCK_T, RANKS), tl.float32)
    two = tl.zeros((BLOCK_T, RANKS), tl.float32)
    three = tl.zeros((BLOCK_T, RANKS), tl.float32)
    for first in range(0, features, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        inside = (t < tokens)[:, None] & (d < features)[None, :]
        x_TD = tl.load(x + t[:, None] * features + d[None, :], mask=inside, other=0.0)
        kept = _is_kept(bits, t, first, tokens, words, BLOCK_D)
        one = _add_inner(one, x_TD, kept, lora_A, r, d, rank, features)
        if LAYERS > 1:
            kept = _is_kept(bits + layer_words, t, first, tokens, words, BLOCK_D)
            two = _add_inner(two, x_TD, kept, lora_A + rank * features, r, d, rank, features)
        if LAYERS > 2:
            kept = _is_kept(bits + 2 * layer_words, t, first, tokens, words, BLOCK_D)
            three = _add_inner(three, x_TD, kept, lora_A + 2 * rank * features, r, d, rank, features)
    at, inside = t[:, None] * LAYERS * rank + r[None, :], (t < tokens)[:, None] & (r < rank)[None, :]
    tl.store(inner + at, one * scaling, mask=inside)
    if LAYERS > 1:
        tl.store(inner + at + rank, two * scaling, mask=inside)
    if LAYERS > 2:
        tl.store(inner + at + 2 * rank, three * scaling, mask=inside)


@triton.jit
def dropped_grad_A(
    outer: tl.tensor,
    x: tl.tensor,
    bits: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    features: tl.tensor,
    words: tl.tensor,
    layer_words: tl.tensor,
    rank: tl.tensor,
    tile: tl.tensor,
    LAYERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Multiply `outer` `(T, R)`, transposed, with an input `(T, D)` with each layer's dropout, for up to three layers.

    A program has BLOCK_D features of `tile` tokens, and writes its part of the sum, `(T / tile, R, D)`.
    """
    column, row = tl.program_id(0), tl.program_id(1)
    d = column * BLOCK_D + tl.arange(0, BLOCK_D)
    r = tl.arange(0, RANKS)
    one = tl.zeros((BLOCK_D, RANKS), tl.float32)
    two = tl.zeros((BLOCK_D, RANKS), tl.float32)
    three = tl.zeros((BLOCK_D, RANKS), tl.float32)
    for first in range(row * tile, min(row * tile + tile, tokens), BLOCK_T):
        t = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = (t < tokens)[:, None] & (d < features)[None, :]
        x_TD = tl.load(x + t[:, None] * features + d[None, :], mask=inside, other=0.0)
        at, inside_R = outer + t[:, None] * LAYERS * rank + r[None, :], (t < tokens)[:, None] & (r < rank)[None, :]
        kept = _is_kept(bits, t, column * BLOCK_D, tokens, words, BLOCK_D)
        one = _add_grad_A(one, x_TD, kept, at, inside_R)
        if LAYERS > 1:
            kept = _is_kept(bits + layer_words, t, column * BLOCK_D, tokens, words, BLOCK_D)
            two = _add_grad_A(two, x_TD, kept, at + rank, inside_R)
        if LAYERS > 2:
            kept = _is_kept(bits + 2 * layer_words, t, column * BLOCK_D, tokens, words, BLOCK_D)
            three = _add_grad_A(three, x_TD, kept, at + 2 * rank, inside_R)
    parts += row.to(tl.int64) * LAYERS * rank * features
    at, inside = parts + r[None, :] * features + d[:, None], (d < features)[:, None] & (r < rank)[None, :]
    tl.store(at, one, mask=inside)
    if LAYERS > 1:
        tl.store(at + rank * features, two, mask=inside)
    if LAYERS > 2:
        tl.store(at + 2 * rank * features, three, mask=inside)


@triton.jit
def _add_grad_A(total: tl.tensor, x_TD: tl.tensor, kept: tl.tensor, outer: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Add a block's product with a layer's ranks of `outer` to `(D, R)`."""
    outer_TR = tl.load(outer, mask=inside, other=0.0)
    return tl.dot(tl.trans(tl.where(kept, x_TD, 0.0).to(x_TD.dtype)), outer_TR, total)


@triton.jit
def dropped_grad_x(
    outer: tl.tensor,
    lora_A: tl.tensor,
    bits: tl.tensor,
    grad_x: tl.tensor,
    tokens: tl.tensor,
    features: tl.tensor,
    words: tl.tensor,
    layer_words: tl.tensor,
    rank: tl.tensor,
    LAYERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Write the sum over layers of `outer @ lora_A` `(T, D)`, with each layer's dropout."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    r = tl.arange(0, RANKS)
    inside_R, inside = (r < rank)[None, :], (t < tokens)[:, None] & (d < features)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for layer in tl.static_range(LAYERS):
        at = outer + t[:, None] * LAYERS * rank + layer * rank + r[None, :]
        outer_TR = tl.load(at, mask=(t < tokens)[:, None] & inside_R, other=0.0)
        at = lora_A + (layer * rank + r)[:, None] * features + d[None, :]
        A_RD = tl.load(at, mask=(r < rank)[:, None] & (d < features)[None, :], other=0.0)
        kept = _is_kept(bits + layer * layer_words, t, tl.program_id(1) * BLOCK_D, tokens, words, BLOCK_D)
        total += tl.where(kept, tl.dot(outer_TR, A_RD), 0.0)
    tl.store(grad_x + t[:, None] * features + d[None, :], total, mask=inside)
