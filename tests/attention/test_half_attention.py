"""Attention in half precision on a CPU: the dtype it runs in, and its precision beside eager attention's."""

import pytest
import torch
import torch.nn.functional as F
from test_attention import CASES, MIXED, assert_as_precise_as_eager_attention

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, get_backend, sdpa

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=["emulated", "native"])
def machine(request, monkeypatch):
    """As on a CPU that emulates half precision, and on one that has its products."""
    monkeypatch.setattr(sdpa, "has_half_products", lambda dtype, device: request.param != "emulated")
    return request.param


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_half_attention_is_as_precise_as_eager(machine, case, dtype):
    """Documents of up to 30 tokens, single ones among them, and a long one."""
    assert_as_precise_as_eager_attention("sdpa", MIXED, case, dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_torchs_kernel_runs_in_float32(machine, autocast, monkeypatch):
    """Results are in half precision all the same."""
    computed, attend = set(), F.scaled_dot_product_attention

    def through_torch(q, *rest, **options):
        out = attend(q, *rest, **options)
        computed.add(out.dtype)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", through_torch)
    layout = PackedLayout.from_lengths((600, 5))
    given = torch.randn(3, layout.num_tokens, 2, 64, dtype=FP32 if autocast else BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        out = get_backend("sdpa")(*given, AttentionArguments(scaling=0.3).on(layout.attention))
    assert out.dtype == BF16 and computed == {FP32}
    out.sum().backward()
    assert given.grad.dtype == given.dtype and given.grad.abs().sum() > 0
