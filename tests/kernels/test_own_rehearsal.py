"""Our Triton kernels for LoRA layers, compiled for GPUs that are not there. Skipped where Triton is missing."""

import pytest
import torch
from rehearsal import compile_launches

from trl_packfa.kernels.lora import launches

pytestmark = pytest.mark.gpu_rehearsal
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# A GPU's architecture, and the bytes of shared memory that a block of threads can have: A100, RTX 4090, H100, B200,
# RTX 5090.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@pytest.fixture(params=SHARED_MEMORY, ids=lambda arch: f"sm_{arch}")
def compiled(monkeypatch, request):
    """The compiled kernels, which are looked at when a test ends."""
    pytest.importorskip("triton")
    found = compile_launches(monkeypatch, request.param)
    yield found
    assert found and all(kernel.cubin > 0 and kernel.shared <= SHARED_MEMORY[request.param] for kernel in found)


@HALF_AND_FULL
def test_swiglu_backward(dtype, compiled):
    gate, up, grad = torch.zeros(3, 2, 14_336, dtype=dtype)
    launches.swiglu_backward(gate, up, grad, overwrites=True)
    assert [kernel.name for kernel in compiled] == ["swiglu_backward"]


# Triton compiles sizes of one as constants.
@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (70, 8), (70, 16), (70, 32)])
@HALF
def test_both_products_of_a_gradient(dtype, tokens, rank, compiled):
    grad, B, narrow = (
        torch.zeros(tokens, 4096, dtype=dtype),
        torch.zeros(4096, rank, dtype=dtype),
        torch.zeros(tokens, 3 * rank),
    )
    inner, outer = narrow.to(dtype), narrow.to(dtype)
    for wanted in (dtype, torch.float32):
        launches.gradient_products(grad, B, inner[:, :rank], outer[:, :rank], 2.0, wanted)
    assert [kernel.name for kernel in compiled] == ["gradient_products", "add_gradient_products"] * 2


@pytest.mark.parametrize(("tokens", "layers", "rank"), [(1, 1, 1), (70, 1, 8), (70, 2, 16), (70, 3, 32)])
@pytest.mark.parametrize("rate", [0.05, 0.99999])  # the largest has a threshold of one
@HALF
def test_dropout(dtype, rate, tokens, layers, rank, compiled):
    x, A, outer = (
        torch.zeros(shape, dtype=dtype) for shape in ((tokens, 4096), (layers * rank, 4096), (tokens, layers * rank))
    )
    bits = launches.draw_bits(torch.zeros(1, dtype=torch.int64), layers, tokens, 4096, rate)
    launches.dropped_inner(x, A, bits, 2.0)
    launches.dropped_grad_A(outer, x, bits)
    launches.dropped_grad_x(outer, A, bits, x)
    names = ["draw_bits", "dropped_inner", "dropped_grad_A", "dropped_grad_x"]
    assert [kernel.name for kernel in compiled] == names
