"""LoRA layers as on CUDA, with stand-ins for the launches of our Triton kernels: results are those of torch's
operators, and nothing is written over that is read again."""

import copy
from contextlib import nullcontext

import pretended_triton
import pytest
import tiny
import torch
from calls import watched
from pretended_liger import pretend_liger
from pretended_triton import pretend_triton
from test_fused_lora import adapted, oracle, run
from test_half_lora import cast_adapters
from tolerance import assert_no_worse, differs
from torch.autograd.graph import saved_tensors_hooks

from trl_packfa import patch
from trl_packfa.kernels import devices
from trl_packfa.kernels.lora import launches, projections
from trl_packfa.kernels.lora.dropout import Dropout

ADAPTERS = pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the stand-in of both products of a gradient."""
    monkeypatch.setattr(projections, "has_half_products", lambda dtype, device: True)
    pretend_liger(monkeypatch)
    found = watched(monkeypatch, pretended_triton, "gradient_products")
    pretend_triton(monkeypatch)
    return found


def half_model(adapters=torch.float32, **lora):
    """A model in bfloat16 with adapters of a dtype."""
    return cast_adapters(adapted(base=tiny.model(layers=2).bfloat16(), **lora), adapters)


def by_torch(model, monkeypatch):
    """Run a model without the launches."""
    with monkeypatch.context() as patched:
        patched.setattr(launches, "runs_on", lambda device: False)
        return run(model, fused=True)


@pytest.mark.parametrize("chunk", [None, 16])
@ADAPTERS
def test_both_products_of_a_gradient_are_torchs(adapters, chunk, calls, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    model = half_model(adapters)
    eager, exact = by_torch(model, monkeypatch), oracle(model)
    assert not calls
    found = run(model, fused=True)
    chunks = 1 if chunk is None else -(-sum(tiny.LENGTHS) // chunk)
    assert len(calls) == 2 * 7 * chunks
    assert_no_worse(found, eager, exact)
    assert all(gradient.dtype == eager[1][name].dtype for name, gradient in found[1].items())


def test_layers_of_several_ranks_and_without_an_adapter_are_torchs(calls, monkeypatch):
    model = half_model(target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"v_proj": 64, "down_proj": 24})
    assert_no_worse(run(model, fused=True), by_torch(model, monkeypatch), oracle(model))
    assert len(calls) == 2 * 2, "64 ranks are left to torch"


@pytest.fixture
def by_one_mask(calls, monkeypatch):
    """Every seed draws bits from one place in a table, and torch's masks are those bits."""

    def bits(seed, layers, tokens, features, rate):
        return pretended_triton.draw_bits(torch.tensor(5), layers, tokens, features, rate)

    def masks(self, shape, generator):
        layers = sum(rate > 0 for rate in self.rates)
        drawn = iter(pretended_triton.kept_by(bits(None, layers, *shape, max(self.rates)), shape[1]))
        return [next(drawn) if rate else None for rate in self.rates]

    monkeypatch.setattr(launches, "draw_bits", bits)
    monkeypatch.setattr(Dropout, "_draw", masks)
    return watched(monkeypatch, launches, "dropped_grad_x")


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "up_proj"]], ids=str)
@ADAPTERS
def test_dropout_by_bits_is_torchs_with_the_same_masks(adapters, targets, chunk, by_one_mask, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    model = half_model(adapters, lora_dropout=0.3, target_modules=targets)
    eager = by_torch(model, monkeypatch)
    assert not by_one_mask
    exact = run(copy.deepcopy(model).double(), fused=True)
    assert not by_one_mask
    found = run(model, fused=True)
    assert by_one_mask
    assert_no_worse(found, eager, exact)
    assert all(gradient.dtype == eager[1][name].dtype for name, gradient in found[1].items())
    monkeypatch.setattr(
        launches, "draw_bits", lambda *given: 0 * pretended_triton.draw_bits(torch.tensor(5), *given[1:])
    )
    assert differs(run(model, fused=True)[0], exact[0]), "the control drops everything"


@pytest.mark.parametrize("change", [{"p": 0.5}, {"training": False}], ids=str)
def test_layers_that_differ_in_their_dropout_are_left_to_torch(change, by_one_mask):
    model = half_model(lora_dropout=0.3, target_modules=["q_proj", "k_proj", "v_proj"])
    for layer in model.base_model.model.model.layers:
        vars(layer.self_attn.k_proj.lora_dropout["default"]).update(change)
    run(model, fused=True)
    assert not by_one_mask


def test_evaluation_draws_no_bits_and_runs_the_kernels_of_training(calls, monkeypatch):
    """So the check, which draws nothing either, sees what training runs."""
    drawn, ran = watched(monkeypatch, launches, "draw_bits"), watched(monkeypatch, launches, "dropped_inner")
    model = patch(half_model(lora_dropout=0.3).eval())
    with torch.no_grad():
        model(**tiny.batch(tiny.documents()))
        assert not drawn and len(ran) == 2 * 4
        model.train()(**tiny.batch(tiny.documents()))
    assert len(drawn) == 2 * 4, "training draws without gradients, too"


def test_evaluation_with_dropout_is_torchs(calls, monkeypatch):
    model = half_model(lora_dropout=0.3).eval()
    assert_no_worse(run(model, fused=True), by_torch(model, monkeypatch), oracle(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("lora_dropout", [0.0, 0.3])
def test_checkpointed_layers_are_those_without(lora_dropout, use_reentrant, calls):
    """They draw the same seeds again. The control is a checkpoint that does not put the random state back.

    Hooks on saved tensors, as a checkpoint that is not reentrant sets them, keep a norm's output itself.
    """

    def gradients(**options):
        model = half_model(lora_dropout=lora_dropout)
        if options:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **options})
        logits, grads = run(model, fused=True)
        return [logits, *(grads[name] for name in sorted(grads))]

    with nullcontext() if use_reentrant else saved_tensors_hooks(lambda x: x, lambda x: x):
        expected = gradients()
    assert all(map(torch.equal, gradients(preserve_rng_state=True), expected))
    if lora_dropout:
        assert not all(map(torch.equal, gradients(preserve_rng_state=False), expected))


@pytest.mark.parametrize("lora_dropout", [0.0, 0.3])
def test_a_graph_that_is_kept_is_not_written_over(lora_dropout, calls):
    model = patch(half_model(lora_dropout=lora_dropout))
    loss = model(**tiny.batch(tiny.documents())).logits.float().sin().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(map(torch.equal, *(torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))))


def test_graphs_launch_them_too(calls):
    """Their backward has no products of the forward, and makes them first."""
    model = patch(half_model())
    compiled = torch.compile(model.base_model.model.model.layers[0].self_attn.q_proj, backend="aot_eager")
    compiled(torch.randn(1, 9, 64, dtype=torch.bfloat16)).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("fits", [torch.zeros(2, 8).bfloat16(), torch.zeros(2, 8).half()], ids=str)
def test_takes_what_the_kernels_take(fits, calls):
    assert launches.takes(fits, 32) and not launches.takes(fits, 33)
    assert not any(launches.takes(other, 8) for other in (fits.float(), fits.double(), fits[:, :4]))


def test_other_devices_run_torch():
    assert not launches.runs_on(torch.device("cpu")) and not launches.runs_on(torch.device("xpu"))
    assert not launches.takes(torch.zeros(2, 8).bfloat16(), 8)


def test_a_triton_that_cannot_launch_leaves_the_work_to_torch_and_says_so(monkeypatch, caplog):
    """As on a machine without the C compiler that Triton needs; here the device is missing."""
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    gone = torch.device("cuda", 63)
    assert not launches.runs_on(gone) and not launches.runs_on(gone)
    (said,) = caplog.messages
    assert "Triton does not run on cuda:63, so torch's operators do: " in said
    monkeypatch.setenv(devices.TRITON, "0")  # then it is not tried
    assert not launches.runs_on(torch.device("cuda", 62)) and len(caplog.messages) == 1
