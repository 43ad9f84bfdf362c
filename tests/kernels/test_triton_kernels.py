"""Our Triton kernels for LoRA layers against plain torch in float64: on a GPU, and by Triton's interpreter on a CPU,
which must be asked for before Triton is imported, so that the first test runs this file in another process."""

import os
import subprocess
import sys
from importlib import import_module

import numpy as np
import pretended_triton
import pytest
import torch
from tolerance import assert_by_chance, assert_float32, assert_half

from trl_packfa.kernels.lora import launches

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the interpreter's process")


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """The interpreter holds bfloat16 as integers, and would multiply these."""
    interpreter = import_module("triton.runtime.interpreter")
    own, handle = interpreter.InterpreterBuilder.create_dot, interpreter.TensorHandle

    def widen(x):
        is_integer = x.data.dtype == np.uint16
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32) if is_integer else x

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: own(self, widen(a), widen(b), *rest)
    )


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_kernels_equal_torch_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def drawn(seed, *options):
    return launches.draw_bits(torch.tensor([seed], device=DEVICE), *options)


# Tokens and features: less than a block, several blocks of a tile and tiles, a model's.
SHAPES = pytest.mark.parametrize("shape", [(5, 80), (70, 1030), (33, 4096)], ids=str)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@runs
@pytest.mark.parametrize("rank", [4, 16, 24, 32])
@SHAPES
@HALF
def test_both_products_of_a_gradient(dtype, shape, rank):
    (tokens, features), scaling = shape, 0.5
    grad, B = randn(*shape, dtype=dtype), randn(features, rank, dtype=dtype, seed=1)
    inner, outer = (
        randn(tokens, rank + 3, dtype=dtype, seed=2),
        torch.zeros(tokens, rank + 2, dtype=dtype, device=DEVICE),
    )
    options = inner[:, 3:], outer[:, 1:-1], scaling
    grad_B = launches.gradient_products(grad, B, *options, torch.float32)
    assert_half(outer[:, 1:-1], (scaling * grad.double() @ B.double()).to(dtype))
    assert_float32(grad_B, grad.double().T @ inner[:, 3:].double())
    assert not outer[:, 0].any() and not outer[:, -1].any(), "the ranks of other layers"
    assert torch.equal(grad_B, launches.gradient_products(grad, B, *options, torch.float32)), "the same order"
    assert_half(launches.gradient_products(grad, B, *options, dtype), grad_B.to(dtype))


@runs
@pytest.mark.parametrize(("layers", "rank"), [(1, 16), (2, 24), (3, 8), (3, 32)])
@SHAPES
@HALF
def test_products_with_dropout(dtype, shape, layers, rank):
    """Each kernel computes PEFT's formula with the same masks, of a chunk of a longer input."""
    (tokens, features), scaling = shape, 0.5
    bits = drawn(7, layers, tokens + 3, features, 0.3)[:, 3:]
    x, outer = randn(*shape, dtype=dtype), randn(tokens, layers * rank, dtype=dtype, seed=1)
    A, kept = randn(layers * rank, features, dtype=dtype, seed=2), pretended_triton.kept_by(bits, features)
    exact_A, exact_outer = A.double().unflatten(0, (layers, rank)), outer.double().unflatten(1, (layers, rank))
    dropped, exact_outer = x.double() * kept, exact_outer.transpose(0, 1)
    exact = (scaling * dropped @ exact_A.mT).transpose(0, 1).flatten(1)
    assert_half(launches.dropped_inner(x, A, bits, scaling), exact.to(dtype))
    assert_float32(launches.dropped_grad_A(outer, x, bits), (exact_outer.mT @ dropped).flatten(0, 1))
    launches.dropped_grad_x(outer, A, bits, grad_x := torch.empty_like(x))
    assert_half(grad_x, ((exact_outer @ exact_A) * kept).sum(0).to(dtype))
    assert_half(pretended_triton.dropped_inner(x, A, bits, scaling), exact.to(dtype))
    assert_float32(pretended_triton.dropped_grad_A(outer, x, bits), (exact_outer.mT @ dropped).flatten(0, 1))


@runs
def test_an_expert_without_tokens_adds_nothing():
    x, A, B = randn(0, 80).half(), randn(8, 80).half(), randn(80, 8).half()
    inner, bits = torch.empty(0, 8, dtype=x.dtype, device=DEVICE), drawn(7, 1, 0, 80, 0.3)
    assert launches.dropped_inner(x, A, bits, 0.5).shape == (0, 8)
    launches.dropped_grad_x(inner, A, bits, x)
    for gradient in (
        launches.dropped_grad_A(inner, x, bits).T,
        launches.gradient_products(x, B, inner, torch.empty_like(inner), 0.5, torch.float32),
    ):
        assert gradient.shape == (80, 8) and not gradient.any()


@runs
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_bits_keep_their_share_and_are_independent(rate):
    """Bits depend on no bit of the other layer, token, feature or seed. The control is a wrong rate."""
    one, again, another = (drawn(seed, 2, 400, 1000, rate) for seed in (3, 3, 2**40 + 3))
    assert torch.equal(one, again)
    off, other = (pretended_triton.kept_by(bits, 1000).double() - (1 - rate) for bits in (one, another))
    assert_by_chance(off)
    pairs = [(off[0], off[1]), (off[:, 1:], off[:, :-1]), (off[..., 1:], off[..., :-1]), (off, other)]
    for one, two in pairs:
        assert_by_chance(one * two)
    for bit in range(32):
        assert_by_chance(off[..., bit::32])
    with pytest.raises(AssertionError, match="standard deviations"):
        assert_by_chance(off + 0.01)


@runs
def test_no_rate_drops_all_or_nothing():
    shares = [
        pretended_triton.kept_by(drawn(3, 1, 400, 1000, rate), 1000).double().mean() for rate in (1e-9, 1 - 1e-9)
    ]
    assert 0.999 < shares[0] < 1 and 0 < shares[1] < 0.001


def test_a_tile_is_small_enough_to_keep_a_gpu_busy():
    programs = []
    for features in (1024, 4096, 14_336):
        tile, *shapes = launches.product_parts(8192, features, 16)
        programs.append((tile, shapes[0][0] * shapes[1][0]))
    assert programs == [(128, 128), (512, 128), (1024, 224)]


@runs
@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("shape", [(3, 80), (5, 1000), (2, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_backward_with_product(dtype, shape, overwrites):
    gate, up, grad = (randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    leaves = [x.double().requires_grad_() for x in (gate, up)]
    exact = torch.nn.functional.silu(leaves[0]) * leaves[1]
    exact_grads = torch.autograd.grad(exact, leaves, grad.double())
    exact = exact.detach()
    given = gate.clone(), up.clone(), grad.clone()
    *grads, product = launches.swiglu_backward(*given, overwrites=overwrites)
    for found, wanted in zip((*grads, product), (*exact_grads, exact), strict=True):
        assert_half(found, wanted.to(dtype))
    assert product is given[2] and ((grads[0] is given[0]) and (grads[1] is given[1])) == overwrites
    assert overwrites or (torch.equal(given[0], gate) and torch.equal(given[1], up))
