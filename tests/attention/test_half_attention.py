"""Attention in half precision on a CPU: which dtype each half of it runs in, that its result is as precise as eager
attention's, and what it saves."""

import pytest
import torch
import torch.nn.functional as F
from test_attention import CASES, assert_as_precise_as_eager_attention
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_low_precision, differs

from trl_packfa import PackedLayout
from trl_packfa.attention import AttentionArguments, get_backend
from trl_packfa.attention import cpu_half as half_on_cpu
from trl_packfa.attention.cpu_half import CausalInHalf
from trl_packfa.layout.length_groups import _grouped

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BF16, FP32 = torch.bfloat16, torch.float32
SHORT, MIDDLE = half_on_cpu._ALL_IN_FLOAT32 // 64, half_on_cpu._BACKWARD_IN_FLOAT32 // 64
PLAIN = AttentionArguments(scaling=0.3)


@pytest.fixture(params=["emulated", "native", "AMX"])
def machine(request, monkeypatch):
    """As on a CPU that emulates half precision, on one that has its products, and on one with AMX."""
    monkeypatch.setattr(half_on_cpu, "has_half_products", lambda dtype, device: request.param != "emulated")
    monkeypatch.setattr(half_on_cpu, "_has_amx", lambda: request.param == "AMX")
    return request.param


@pytest.fixture
def computed(monkeypatch):
    """`(length, dtype)` of all that either half of torch's kernel was given here, and not through its function."""
    calls, by_head = set(), half_on_cpu._by_head

    def recorded(x, num_key_value_heads, dtype):
        calls.add((x.shape[2], dtype))
        prepared = by_head(x, num_key_value_heads, dtype)
        assert prepared.dtype == dtype
        return prepared

    monkeypatch.setattr(half_on_cpu, "_by_head", recorded)
    return calls


def heads(length, *, key_value=2, dtype=BF16, seed=0):
    """Query of 4 heads, key and value of so many, of 3 documents, and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, length, count, 16) for count in (4, key_value, key_value, 4)]
    *qkv, upstream = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    return [tensor.requires_grad_() for tensor in qkv], upstream


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_half_attention_is_as_precise_as_eager(machine, case, dtype, monkeypatch):
    """Documents of up to 30 tokens, single ones among them, and a long one, none of them short enough for float32."""
    monkeypatch.setattr(half_on_cpu, "_ALL_IN_FLOAT32", 0)
    monkeypatch.setattr(half_on_cpu, "_BACKWARD_IN_FLOAT32", 30 * 16)
    assert_as_precise_as_eager_attention(get_backend("sdpa"), case, dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_each_half_runs_in_the_dtype_that_is_faster(machine, computed, autocast, monkeypatch):
    """Results are in half precision all the same. Short documents, and all where half precision is emulated, run
    through torch's function, in float32."""
    monkeypatch.setattr("trl_packfa.layout.length_groups._SLACK_SHARE", 0.0)
    monkeypatch.setattr("trl_packfa.layout.length_groups._SLACK_TOKENS", 0)
    _grouped.cache_clear()
    in_float32, attend = set(), F.scaled_dot_product_attention

    def through_torch(q, *rest, **options):
        in_float32.add((q.shape[2], q.dtype))
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", through_torch)
    lengths = (MIDDLE + 1, MIDDLE, SHORT + 1, SHORT)
    layout = PackedLayout.from_lengths(lengths)
    given = torch.randn(3, layout.num_tokens, 2, 64, dtype=FP32 if autocast else BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        out = get_backend("sdpa")(*given, PLAIN.on(layout.attention))
    _grouped.cache_clear()
    halves = lengths[:0] if machine == "emulated" else lengths[:3]
    assert out.dtype == BF16 and computed == {(length, BF16) for length in halves}
    assert in_float32 == {(length, FP32) for length in lengths if length not in halves}
    computed.clear()
    out.sum().backward()
    assert given.grad.dtype == given.dtype and given.grad.abs().sum() > 0
    assert computed == {(n, BF16 if machine == "AMX" and n > MIDDLE else FP32) for n in halves}


@pytest.mark.parametrize("key_value", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 40, 200])
def test_against_torchs_own_function(key_value, length):
    """Whatever the strides of the upstream gradient; another scaling is the negative control."""
    qkv, upstream = heads(length, key_value=key_value)
    theirs = []
    for dtype in (BF16, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
        theirs.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    out = CausalInHalf.apply(*qkv, 0.3)
    ours = [out, *torch.autograd.grad(out, qkv, upstream, retain_graph=True)]
    for number, (actual, eager, exact) in enumerate(zip(ours, *theirs, strict=True)):
        assert actual.dtype == BF16 and actual.shape == exact.shape
        assert_low_precision(actual, eager, exact, factor=GRADIENT_FACTOR if number else FORWARD_FACTOR)
    strided = upstream.transpose(2, 3).contiguous().transpose(2, 3)
    assert all(map(torch.equal, torch.autograd.grad(out, qkv, strided), ours[1:]))
    assert length == 1 or differs(CausalInHalf.apply(*qkv, 0.4), theirs[1][0])


def test_half_attention_saves_neither_float32_nor_repeated_heads():
    qkv, _ = heads(40)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = CausalInHalf.apply(*qkv, 0.3)
    assert sorted(x.numel() for x in saved) == sorted([x.numel() for x in (*qkv, out)] + [3 * 4 * 40])
    assert sorted(x.dtype == BF16 for x in saved) == [False, True, True, True, True]


@pytest.mark.parametrize(("dtype", "value_dim", "options"), [
    (FP32, 16, {}),
    (BF16, 8, {}),
    (BF16, 16, {"dropout": 0.1}),
    (BF16, 16, {"softcap": 4.0}),
    (BF16, 16, {"sliding_window": 11}),
], ids=["float32", "another width of values", "dropout", "softcap", "window"])  # fmt: skip
def test_what_the_kernel_lacks_runs_without_it(dtype, value_dim, options, computed, monkeypatch):
    """The same call without what it lacks is taken by it."""
    monkeypatch.setattr(half_on_cpu, "has_half_products", lambda dtype, device: True)
    monkeypatch.setattr(half_on_cpu, "_ALL_IN_FLOAT32", 0)
    layout = PackedLayout.from_lengths((12, 9))
    query, key = torch.randn(2, layout.num_tokens, 4, 16, dtype=dtype)
    value = torch.randn(layout.num_tokens, 4, value_dim, dtype=dtype)
    out = get_backend("sdpa")(query, key, value, AttentionArguments(scaling=0.3, **options).on(layout.attention))
    assert out.shape == value.shape and not computed
    get_backend("sdpa")(*(x.bfloat16() for x in (query, key, key)), PLAIN.on(layout.attention))
    assert computed


def test_a_torch_without_the_kernel(monkeypatch, computed):
    """It is private to torch: where it is gone, torch's public function attends."""
    monkeypatch.setattr(half_on_cpu, "has_half_products", lambda dtype, device: True)
    monkeypatch.setattr(half_on_cpu, "_ALL_IN_FLOAT32", 0)
    monkeypatch.setattr(half_on_cpu, "_KERNEL", "no_such_kernel")
    assert_as_precise_as_eager_attention(get_backend("sdpa"), {}, BF16)
    assert not computed
