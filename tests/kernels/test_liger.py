"""Liger's kernels in packed calls on CUDA, by stand-ins that are as strict: results are the model's own, nothing else
runs them, nothing is written over that is read again."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pretended_liger
import pytest
import tiny
import torch
import torch.nn.functional as F
from peft import PeftModel
from pretended_liger import pretend_liger
from test_fused_lora import adapted
from tolerance import assert_gradients, assert_no_worse, assert_recomputed, differs
from training import arguments, packed_trainer, trained
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trl_packfa import PackedLayout, check, describe, patch, unpatch
from trl_packfa.errors import ContaminationError
from trl_packfa.kernels import liger, rotary
from trl_packfa.kernels.lora import projections
from trl_packfa.kernels.norms import RMSNormOverride
from trl_packfa.kernels.rotary import rotate
from trl_packfa.layout.call_context import packed_call
from trl_packfa.patching.apply import compile_layers


@pytest.fixture
def calls(monkeypatch):
    return pretend_liger(monkeypatch)


def run(model, *, context=nullcontext, **options):
    return tiny.logits_and_gradients(patch(unpatch(model), **options), context=context)


# Norms, layers that rotate, gated products of two layers. Phi rotates half a head, its norms and MLPs are others.
# Norms of Gemma 2 add one to their weights, its MLPs take GELU. In a backward, fused LoRA computes the output of both
# norms of a layer again.
AGAIN = 2 * 2
COUNTS = {
    "llama": (5, 2, 2), "llama with GELU": (5, 2, 0), "qwen3": (9, 2, 2), "phi": (0, 2, 0), "phi3": (5, 2, 0),
    "gemma2": (0, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize(("architecture", "counts"), COUNTS.items(), ids=COUNTS)
def test_results_are_the_models_own(architecture, counts, lora, calls):
    architecture, *other = architecture.split(" with ")
    base = tiny.model(architecture, layers=2, **({"hidden_act": "gelu"} if other else {}))
    model = adapted(base=base) if lora else base.train()
    expected, expected_grads = run(model, fused_kernels=False)
    assert not calls
    logits, grads = run(model)
    # A norm's input may have no gradient; an MLP with adapters computes its product again in the backward.
    norms, *others = counts
    norms += AGAIN if lora and norms else 0
    assert [calls["rms_norm"], calls["rope"], calls["swiglu_backward"]] == [norms, *others]
    assert ("SwiGLU" in describe(model)) == bool(others[1])
    assert_recomputed(logits, expected)
    assert_gradients(grads, expected_grads)


@pytest.mark.parametrize("build", [
    adapted, partial(adapted, lora_dropout=0.3), partial(tiny.model, layers=2)
], ids=["LoRA", "dropout", "full"])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_the_truth(dtype, autocast, build, calls, monkeypatch):
    """In bfloat16 gradients of `lora_A` come from the input of a norm, and no norm runs again."""
    monkeypatch.setattr(projections, "has_half_products", lambda dtype, device: True)  # a CPU may have none
    context = partial(torch.autocast, "cpu", dtype) if autocast else nullcontext
    model = build().train()
    half, found = model if autocast else copy.deepcopy(model).to(dtype), []
    for kind in ("ours", "own", "exact"):
        torch.manual_seed(7)
        if kind == "ours":
            found.append(run(half, context=context))
            again = AGAIN if isinstance(model, PeftModel) and dtype is torch.float16 else 0
            assert [calls["rms_norm"], calls["rope"], calls["swiglu_backward"]] == [5 + again, 2, 2]
        else:
            given = {"own": half, "exact": copy.deepcopy(model).double()}[kind]
            found.append(run(given, fused_kernels=False, context=context if kind == "own" else nullcontext))
    assert_no_worse(*found)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "PEFT's own"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_ligers_kernels_under_gradient_checkpointing_have_the_same_gradients(reentrant, fused, calls):
    model = adapted(use_dora=not fused)
    model.enable_input_require_grads()
    expected = run(model, fused_kernels=False)[1]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    grads = run(model)[1]
    # A reentrant checkpoint has no hooks that would tell that the second forward is one.
    norms = 2 * 4 + 1 + AGAIN * (reentrant and fused)
    assert calls["rms_norm"] == norms and calls["rope"] == 2 * 2, "each layer twice"
    assert_gradients(grads, expected)


@pytest.mark.parametrize("model", [adapted, partial(tiny.model, layers=2)], ids=["LoRA", "full"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "control"])
def test_a_graph_that_is_kept_is_not_written_over(asked, model, calls, monkeypatch):
    """The control overwrites gate and up though they are read again."""
    if not asked:
        for module in ("liger", "lora.products"):
            monkeypatch.setattr(f"trl_packfa.kernels.{module}.is_last_backward", lambda: True)
    model = patch(model().train())
    loss = model(**tiny.batch(tiny.documents())).logits.sin().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    first, again = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again)) == asked


def test_the_rotation_writes_over_nothing(calls):
    """Of its callers': a hook on a projection may have kept what it returned."""
    query, key = (torch.randn(1, 9, heads, 8) for heads in (4, 2))
    angles = torch.randn(1, 9, 4).repeat(1, 1, 2)
    before = query.clone(), key.clone()
    rotated = rotate(query, key, angles.cos(), angles.sin())
    assert calls["rope"] == 1 and torch.equal(query, before[0]) and torch.equal(key, before[1])
    assert differs(rotated[0], query) and rotated[0].is_contiguous()


@pytest.mark.parametrize(("build", "hooked", "owned"), [
    (adapted, False, True),
    (adapted, True, False),
    (partial(adapted, "qwen3"), False, False),
    (partial(tiny.model, layers=2), False, False),
    (partial(tiny.model, layers=2), True, False),
], ids=["fused", "hooked", "after q_norm", "full", "full, hooked"])  # fmt: skip
def test_the_rotation_writes_over_outputs_of_fused_layers_alone(build, hooked, owned, calls, monkeypatch):
    """Gradients are those of copies, to the bit, and what a hook has kept stays."""
    seen, kept, rotates = [], [], rotary.rotate_by_liger

    def rotate_by_liger(*given, overwrites):
        before = given[1].clone(), given[2].clone()
        found = rotates(*given, overwrites=overwrites)
        seen.append(any(map(differs, given[1:3], before)))
        return found

    def copying(*given, overwrites):
        return rotates(*given, overwrites=False)

    model = build()
    for layer in model.get_decoder().layers if hooked else ():
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    found = []
    for function in (copying, rotate_by_liger):
        monkeypatch.setattr(rotary, "rotate_by_liger", function)
        found.append(run(model))
    assert seen == [owned] * 2 and len(kept) == 4 * hooked and all(torch.equal(*pair) for pair in kept)
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


def test_graphs_fuse_by_themselves_and_calls_that_are_not_packed_run_none(calls):
    model, ids = tiny.model(layers=2), torch.arange(3, 20)[None]
    expected = model(input_ids=ids).logits
    assert torch.equal(patch(model)(input_ids=ids).logits, expected) and not calls
    model = patch(adapted())
    compile_layers(model, backend="aot_eager")
    model(**tiny.batch(tiny.documents())).logits.sum().backward()
    assert calls == {"rms_norm": 1, "rms_norm_backward": 1}, "the last norm, which stands behind the layers"


def test_the_kernels_get_what_they_take_alone(calls):
    """A float32 norm of a half-precision input has a float32 result, Liger's would be half."""
    fits = torch.zeros(2, 8)
    assert liger.takes(fits, fits)
    others = [fits.double(), fits.half(), fits[:, :4], fits.to("meta"), torch.zeros(1, 65537)]
    assert not any(liger.takes(fits, other) for other in others)
    for given, weights in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        norm, x = LlamaRMSNorm(8).to(weights), torch.randn(5, 8).to(given)
        with packed_call(PackedLayout.from_lengths((5,))):
            assert torch.equal(RMSNormOverride(norm)(x), norm(x))
    assert not calls


@pytest.mark.parametrize("narrow", [0, 256], ids=["wide", "narrow"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_backward_leaves_the_incoming_gradient(dtype, trains, narrow, calls, monkeypatch):
    monkeypatch.setattr(liger, "_NARROW", narrow)
    norm, x, grad = LlamaRMSNorm(8).to(dtype), torch.randn(2, 5, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    own = {"liger": lambda x, weight: liger.norm_by_liger(liger.liger_kernels(), 1e-6, x, weight)[0],
           "own": lambda x, weight: weight * F.rms_norm(x.float(), (8,), eps=1e-6).to(dtype),
           "exact": lambda x, weight: F.rms_norm(x, (8,), weight, eps=1e-6)}  # fmt: skip
    found = []
    for kind, run_norm in own.items():
        to = torch.float64 if kind == "exact" else dtype
        given = x.to(to).requires_grad_(), norm.weight.detach().to(to).requires_grad_(trains)
        out, incoming = run_norm(*given), grad.to(to)
        gradients = torch.autograd.grad(out, given[: 1 + trains], incoming)
        assert torch.equal(incoming, grad.to(to))
        found.append((out.detach(), dict(enumerate(gradients))))
    assert_no_worse(*found)


def test_describe_says_what_runs(calls, monkeypatch):
    model = patch(adapted())
    for line in ("5 x RMSNorm", "2 x rotation", "2 x SwiGLU"):
        assert f"{line}: liger-kernel 0.8.5, in packed calls" in describe(model)
    assert "the model's own code (fused_kernels=False)" in describe(patch(model, fused_kernels=False))
    patch(model)
    monkeypatch.setattr("trl_packfa.patching.describe.liger_unavailable", lambda: "liger-kernel is not installed")
    assert "own code (liger-kernel is not installed)" in describe(model)


@pytest.mark.parametrize("lora_dropout", [0.0, 0.05])
def test_the_check_proves_them(lora_dropout, calls, monkeypatch):
    """With the model, as it trains. A kernel that is slightly wrong is found: documents alone run the model's own."""
    model = patch(adapted(lora_dropout=lora_dropout))
    assert check(model).is_exact and calls["rms_norm"] and calls["swiglu_forward"] and calls["rope"]
    own = pretended_liger.swiglu_forward
    wrong = liger.liger_kernels()._replace(swiglu_forward=lambda a, b: (*own(a, b)[:2], own(a, b)[2] * 1.01))
    monkeypatch.setattr(liger, "liger_kernels", lambda: wrong)
    with pytest.raises(ContaminationError):
        check(model).require_exact()


@pytest.mark.parametrize("fused", [True, False])
def test_the_trainer_hands_on_the_switch(fused, calls):
    trainer = trained(packed_trainer(arguments(fused_kernels=fused, max_steps=1)))
    assert bool(calls) == fused and ("x LoRA: fused" in describe(trainer.model)) == fused
    assert trainer.check_report.is_exact


@pytest.mark.parametrize(("version", "change", "reason"), [
    (None, {}, "not installed: pip install 'trl-packfa[kernels]'"),
    ("0.8.4", {}, "liger-kernel 0.8.4 is older than 0.8.5"),
    ("0.9", {"swiglu_forward": lambda gate, up: None}, "swiglu_forward takes"),
    ("0.9", {"LigerRopeFunction": None}, "cannot be imported: AttributeError"),
    ("0.9", {}, None),
])  # fmt: skip
def test_why_it_is_not_used(version, change, reason, monkeypatch):
    names = {name: getattr(pretended_liger, name) for name in liger._FUNCTIONS} | change
    ops = SimpleNamespace(**{name: value for name, value in names.items() if value is not None})
    monkeypatch.setattr(liger, "installed_version", lambda package: version)
    monkeypatch.setattr(liger, "import_module", lambda name: ops)
    found = liger._load.__wrapped__()
    assert (reason in found) if reason else found.version == version


def test_liger_is_looked_for_once_and_nothing_is_taken_without_it():
    """As on this machine, or on one whose Liger finds no GPU."""
    assert liger.norm_on_cuda(torch.ones(2, 8), torch.ones(8)) is None
    assert not liger.is_swiglu_on_cuda(tiny.model(layers=1).model.layers[0].mlp)
    assert liger.liger_kernels() is liger.liger_kernels()
