"""Rotation and norms in pieces: transformers' results, its gradients or better, and less memory."""

import pytest
import tiny
import torch
from tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, assert_float32, assert_low_precision, differs
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from trl_packfa import PackedLayout, describe, patch
from trl_packfa.kernels.norms import RMSNormOverride, has_norm_kernel
from trl_packfa.kernels.rotary import rotate
from trl_packfa.layout.call_context import packed_call
from trl_packfa.override import override_in

LAYOUT = PackedLayout.from_lengths((5, 12))
PIECES = {"one piece": 2**18, "pieces of 5 rows": 5 * 64, "pieces of one": 1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=PIECES.values(), ids=PIECES.keys(), autouse=True)
def pieces(monkeypatch, request):
    """Of every size, the last of them short."""
    monkeypatch.setattr("trl_packfa.kernels.cpu._ELEMENTS", request.param)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])


def assert_closer_to(oracle, actual, theirs, *, factor):
    """Float32 to float32's tolerance, half precision no worse than transformers'."""
    if actual.dtype == torch.float32:
        assert_float32(actual, oracle)
    else:
        assert actual.dtype == theirs.dtype
        assert_low_precision(actual, theirs, oracle, factor=factor)


@pytest.mark.parametrize("rotated", [16, 8], ids=["whole heads", "half heads"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one row of positions", "positions of each row"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_rotation_in_pieces_equals_transformers(dtype, rows, rotated):
    """Two rows of 17 tokens, four and two heads; sine and cosine are any numbers, their halves not alike."""
    heads = [random(2, 17, n, 16, seed=n) for n in (4, 2)]
    tables = [random(rows, 17, rotated, seed=seed) for seed in (5, 6)]
    upstream = [random(*x.shape, seed=9) for x in heads]

    def run(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in heads]
        outputs = function(*inputs, *(table.to(dtype) for table in tables))
        return [*(o.detach() for o in outputs), *gradients(outputs, inputs, upstream)]

    results = run(rotate, dtype), run(by_transformers, dtype), run(by_transformers, torch.float64)
    factors = (FORWARD_FACTOR, FORWARD_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR)
    for ours, theirs, oracle, factor in zip(*results, factors, strict=True):
        assert_closer_to(oracle, ours, theirs, factor=factor)
        assert differs(ours.roll(1, 1), oracle)


def by_transformers(query, key, cos, sin):
    width = cos.shape[-1]
    rotated = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin, unsqueeze_dim=2)
    return [torch.cat((r, x[..., width:]), -1) for r, x in zip(rotated, (query, key), strict=True)]


@pytest.mark.parametrize("rotated", [16, 8], ids=["whole heads", "half heads"])
def test_other_devices_run_transformers_code(rotated, monkeypatch):
    monkeypatch.setattr("trl_packfa.kernels.rotary.are_worth_it", lambda x: False)
    given = [random(2, 17, n, 16, seed=n) for n in (4, 2)] + [random(1, 17, rotated, seed=seed) for seed in (5, 6)]
    for ours, theirs in zip(rotate(*given), by_transformers(*given), strict=True):
        assert torch.equal(ours, theirs)


def test_queries_are_promoted_as_transformers_does():
    """Under autocast projections are in half precision, tables in float32."""
    query, tables = random(1, 4, 2, 16, seed=0).bfloat16().requires_grad_(), random(2, 1, 4, 16, seed=1)
    ours, _ = rotate(query, query, *tables)
    assert ours.dtype == by_transformers(query, query, *tables)[0].dtype == torch.float32
    (grad,) = torch.autograd.grad(ours.sum(), query)
    assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_norm_in_pieces_equals_llamas(dtype, trained):
    norm, x, upstream = LlamaRMSNorm(64), random(2, 17, 64, seed=0), [random(2, 17, 64, seed=1)]
    norm.weight.data.copy_(random(64, seed=2))
    norm.weight.requires_grad_(trained)

    def run(forward, dtype):
        norm.to(dtype)
        inputs = [x.to(dtype).requires_grad_(), *([norm.weight] if trained else [])]
        with packed_call(LAYOUT):
            output = forward(inputs[0])
        return [output.detach(), *gradients([output], inputs, upstream)]

    ours, theirs = run(RMSNormOverride(norm), dtype), run(norm.forward, dtype)
    assert torch.equal(ours[0], theirs[0])
    oracle = run(lambda x: norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), torch.float64)
    for mine, eager, exact in zip(ours[1:], theirs[1:], oracle[1:], strict=True):
        assert_closer_to(exact, mine, eager, factor=GRADIENT_FACTOR)
        assert differs(mine.roll(1, 0), exact)


def test_only_packed_calls_are_in_pieces(monkeypatch):
    """The control of the test above: what runs outside of a packed call is the norm's own forward."""
    norm, x = LlamaRMSNorm(64), random(3, 64, seed=0)
    override = RMSNormOverride(norm)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: -x)
    assert torch.equal(override(x), -x)
    with packed_call(LAYOUT):
        assert not torch.equal(override(x), -x)


def test_which_norms_are_llamas():
    llama, gemma = LlamaRMSNorm(8), Gemma2RMSNorm(8)
    assert has_norm_kernel(llama)
    assert not any(map(has_norm_kernel, (gemma, nn.LayerNorm(8), nn.RMSNorm(8))))
    llama.forward = lambda x: x
    assert not has_norm_kernel(llama), "a kernel of somebody else's is in its place"


@pytest.mark.parametrize("architecture, norms", [("llama", 9), ("qwen3", 17), ("gemma2", 0), ("phi", 0)])
def test_a_patch_finds_the_norms(architecture, norms):
    """Two a layer and the last; Qwen3 has two more for query and key."""
    model = tiny.model(architecture)
    patch(model)
    overrides = [m for m in model.modules() if isinstance(override_in(m), RMSNormOverride)]
    assert len(overrides) == norms
    assert (f"{norms} x RMSNorm: in pieces" in describe(model)) == bool(norms)


def test_less_is_kept_for_the_backward():
    """Counted as autograd saves it: a norm keeps its input and a number per token, transformers' two more tensors."""
    norm, x = LlamaRMSNorm(64), random(2, 17, 64, seed=0).requires_grad_()

    def kept(forward):
        saved = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t)
        with packed_call(LAYOUT), hooks:
            forward(x)
        return sum(t.numel() for t in saved.values())

    assert kept(RMSNormOverride(norm)) == x.numel() + 34 + 64
    assert kept(norm.forward) >= 2 * x.numel()
