"""Our Triton kernels for LoRA layers, run by Triton's interpreter on a CPU, against plain torch in float64. The
interpreter must be asked for before Triton is imported, so that the first test runs this file in another process."""

import os
import subprocess
import sys

import pytest
import torch
from tolerance import assert_half

pytest.importorskip("triton")

from trl_packfa.kernels.lora import launches

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_kernels_equal_torch_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@interpreted
@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("shape", [(3, 80), (5, 1000), (2, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_backward_with_product(dtype, shape, overwrites):
    gate, up, grad = (randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    leaves = [x.double().requires_grad_() for x in (gate, up)]
    exact = torch.nn.functional.silu(leaves[0]) * leaves[1]
    exact_grads = torch.autograd.grad(exact, leaves, grad.double())
    given = gate.clone(), up.clone(), grad.clone()
    *grads, product = launches.swiglu_backward(*given, overwrites=overwrites)
    for found, wanted in zip((*grads, product), (*exact_grads, exact), strict=True):
        assert_half(found, wanted.to(dtype))
    assert product is given[2] and ((grads[0] is given[0]) and (grads[1] is given[1])) == overwrites
    assert overwrites or (torch.equal(given[0], gate) and torch.equal(given[1], up))
