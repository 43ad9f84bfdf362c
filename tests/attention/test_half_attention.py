"""Attention in half precision on a CPU: the dtype it runs in, and its precision beside eager attention's."""

import pytest
import torch
import torch.nn.functional as F
from test_attention import CASES, assert_as_precise_as_eager_attention

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, get_backend, sdpa
from trl_packfa.layout.length_groups import _grouped

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BF16, FP32 = torch.bfloat16, torch.float32
SHORT = sdpa._IN_FLOAT32 // 64


@pytest.fixture(params=["emulated", "native"])
def machine(request, monkeypatch):
    """As on a CPU that emulates half precision, and on one that has its products."""
    monkeypatch.setattr(sdpa, "has_half_products", lambda dtype, device: request.param != "emulated")
    return request.param


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_half_attention_is_as_precise_as_eager(machine, case, dtype, monkeypatch):
    """Documents of up to 30 tokens, single ones among them, and a long one, none of them short enough for float32."""
    monkeypatch.setattr(sdpa, "_IN_FLOAT32", 0)
    assert_as_precise_as_eager_attention(get_backend("sdpa"), case, dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_each_document_is_attended_to_in_the_dtype_that_is_faster(machine, autocast, monkeypatch):
    """Results are in half precision all the same. Short documents, and all where half precision is emulated, run in
    float32."""
    monkeypatch.setattr("trl_packfa.layout.length_groups._SLACK_SHARE", 0.0)
    monkeypatch.setattr("trl_packfa.layout.length_groups._SLACK_TOKENS", 0)
    _grouped.cache_clear()
    computed, attend = set(), F.scaled_dot_product_attention

    def through_torch(q, *rest, **options):
        out = attend(q, *rest, **options)
        computed.add((q.shape[2], out.dtype))
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", through_torch)
    lengths = (2 * SHORT, SHORT + 1, SHORT, 5)
    layout = PackedLayout.from_lengths(lengths)
    given = torch.randn(3, layout.num_tokens, 2, 64, dtype=FP32 if autocast else BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        out = get_backend("sdpa")(*given, AttentionArguments(scaling=0.3).on(layout.attention))
    _grouped.cache_clear()
    long = lengths[:2] if machine == "native" else ()
    assert out.dtype == BF16 and computed == {(n, BF16 if n in long else FP32) for n in lengths}
    out.sum().backward()
    assert given.grad.dtype == given.dtype and given.grad.abs().sum() > 0
