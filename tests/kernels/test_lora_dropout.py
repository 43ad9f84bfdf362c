"""Dropout inside fused LoRA layers: PEFT's masks from the same random state, forward, backward and recomputed."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import tiny
import torch
from operations import kept_bytes
from test_fused_lora import adapted, assert_same, patch_beside_peft, run
from tolerance import assert_float32, assert_gradients, assert_no_worse, differs
from torch import nn

from trl_packfa import check, describe, patch, unpatch
from trl_packfa.kernels.lora import projections
from trl_packfa.kernels.lora.dropout import Dropout
from trl_packfa.kernels.lora.projections import read

RATE = 0.3


def seeded(context=nullcontext, seed=7):
    """Return a context whose random numbers begin at a seed."""

    @contextmanager
    def enter():
        torch.manual_seed(seed)
        with context():
            yield

    return enter


def dropping(model=None, *, fused=True, seed=7, context=nullcontext, **lora):
    """Run a model with dropout, PEFT's or ours; return its logits and gradients."""
    model = adapted(lora_dropout=RATE, **lora) if model is None else model
    return run(model, fused=fused, context=seeded(context, seed))


def assert_pefts(model):
    """Assert tier 3 with the same masks, that it was fused, and that other masks give something else."""
    exact, exact_grads = dropping(copy.deepcopy(unpatch(model)).double(), fused=False)
    (expected, _), (logits, grads) = dropping(model, fused=False), dropping(model)
    assert not torch.equal(logits, expected), "nothing was fused"
    assert_float32(logits, exact)
    assert_gradients(grads, exact_grads)
    others, other_grads = dropping(model, seed=8)
    assert differs(others, exact) and all(differs(grad, exact_grads[name]) for name, grad in other_grads.items())


@pytest.mark.parametrize("architecture", ["llama", "phi", "phi3", "gemma2"])
def test_fused_lora_with_dropout_equals_peft_with_the_same_masks(architecture):
    model = adapted(architecture, lora_dropout=RATE)
    assert_pefts(model)
    assert "LoRA: fused" in describe(patch(model))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["up_proj", "o_proj"]])
def test_dropout_beside_layers_without_an_adapter_equals_peft(targets):
    assert_pefts(adapted(target_modules=targets, lora_dropout=RATE))


def test_layers_with_other_rates_equal_peft():
    model = adapted(lora_dropout=RATE)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.lora_dropout["default"] = nn.Identity()
        layer.self_attn.v_proj.lora_dropout["default"] = nn.Dropout(0.6)
        layer.mlp.gate_proj.lora_dropout["default"].eval()
    assert_pefts(model)


@pytest.mark.parametrize("chunk", [7, 16])
def test_rows_longer_than_a_chunk_have_pefts_masks(chunk, monkeypatch):
    monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    assert_pefts(adapted(lora_dropout=RATE))


@pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_dropout_is_no_worse_than_peft(dtype, autocast, native, monkeypatch):
    monkeypatch.setattr(projections, "has_half_products", lambda dtype, device: native)
    model = adapted(lora_dropout=RATE) if autocast else adapted(base=tiny.model(layers=2).to(dtype), lora_dropout=RATE)
    if not autocast:
        model.to(dtype)
    context = partial(torch.autocast, "cpu", dtype=dtype) if autocast else nullcontext
    exact = dropping(copy.deepcopy(model).double(), fused=False)
    eager, found = dropping(model, fused=False, context=context), dropping(model, context=context)
    assert found[0].dtype == eager[0].dtype and not torch.equal(found[0], eager[0])
    assert_no_worse(found, eager, exact)


def test_qlora_with_dropout_equals_peft(tmp_path):
    model = adapted(base=tiny.quantized(tmp_path, tiny.NF4 | {"bnb_4bit_compute_dtype": "float32"}), lora_dropout=RATE)
    (expected, expected_grads), (logits, grads) = dropping(model, fused=False), dropping(model)
    assert not torch.equal(logits, expected)
    assert_float32(logits, expected)
    assert_gradients(grads, expected_grads)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_draw_the_same_masks_again(use_reentrant, chunk, monkeypatch):
    """The control is a checkpoint that does not put the random state back."""
    if chunk is not None:
        monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    expected, model = dropping(), adapted(lora_dropout=RATE)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(dropping(model), expected)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, "preserve_rng_state": False})
    logits, grads = dropping(model)
    assert torch.equal(logits, expected[0])
    assert any(differs(grad, expected[1][name]) for name, grad in grads.items())


@pytest.mark.parametrize("by_autocast", [False, True])
def test_a_forward_without_gradients_draws_pefts_masks(by_autocast):
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if by_autocast else nullcontext

    def logits(fused):
        model = (patch if fused else patch_beside_peft)(adapted(lora_dropout=RATE))
        with torch.no_grad(), seeded(context)():
            return model(**tiny.batch(tiny.documents())).logits, torch.get_rng_state()

    (ours, our_state), (pefts, pefts_state) = logits(True), logits(False)
    assert torch.equal(our_state, pefts_state) and not torch.equal(ours, pefts)
    assert by_autocast or assert_float32(ours, pefts) is None


def test_a_step_leaves_the_random_state_where_peft_leaves_it():
    model, states = adapted(lora_dropout=RATE), []
    for fused in (True, False):
        dropping(model, fused=fused)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    torch.manual_seed(7)
    assert not torch.equal(states[0], torch.get_rng_state()), "control: numbers were drawn"


def test_two_backwards_of_one_forward_have_the_same_masks():
    model = patch(adapted(lora_dropout=RATE))
    loss = model(**tiny.batch(tiny.documents())).logits.sin().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(map(torch.equal, *(torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))))


def test_evaluation_draws_nothing():
    model = patch(adapted(lora_dropout=RATE).eval())
    plain = patch(adapted(lora_dropout=0.0).eval())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    ours, expected = (each(**tiny.batch(tiny.documents())).logits for each in (model, plain))
    assert torch.equal(torch.get_rng_state(), state)
    assert_float32(ours, expected)
    assert differs(model.train()(**tiny.batch(tiny.documents())).logits, ours), "the same patch, in training mode"


def test_the_check_runs_the_code_of_training(monkeypatch):
    """In float32 without dropout the update is merged into the weight; with dropout it is added, in a check too."""
    added = []
    init = projections.Projection.base
    monkeypatch.setattr("trl_packfa.kernels.lora.layers._merge", lambda p, dtype: added.append(1) or init(p, dtype))
    assert check(patch(adapted(lora_dropout=RATE))).is_exact and not added


def test_no_mask_is_kept_for_the_backward():
    kept = []
    for rate in (RATE, 0.0):
        model = patch(adapted(lora_dropout=rate))
        kept.append(kept_bytes(model, partial(model, **tiny.batch(tiny.documents()))))
    # With dropout the narrow products with `lora_A` are kept: of 6 layers in each of 2, rank 4, 4 bytes a number.
    narrow = 2 * 6 * 4 * 4 * sum(tiny.LENGTHS)
    assert kept[0] == kept[1] + narrow


def test_masks_are_each_layers_own_and_keep_their_share():
    layers = adapted(lora_dropout=RATE).base_model.model.model.layers[0].self_attn
    projections = [read(getattr(layers, name)) for name in ("q_proj", "k_proj", "v_proj")]
    dropout = Dropout(projections, torch.device("cpu"), torch.float32)
    masks = dropout.draw(500, 64)
    shares = [float(mask.float().mean()) for mask in masks]
    assert shares == pytest.approx([1 - RATE] * 3, abs=0.02)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert all(map(torch.equal, masks, dropout.draw_again(500, 64)))


@pytest.mark.parametrize("module", [nn.Dropout(1.0), nn.AlphaDropout(0.1)], ids=repr)
def test_other_dropout_is_left_to_peft(module):
    model = adapted()
    for layer in model.modules():
        if "lora_dropout" in vars(layer).get("_modules", {}):
            layer.lora_dropout["default"] = copy.deepcopy(module)
    torch.manual_seed(7)
    patch(model)
    assert f"lora_dropout={module}" in describe(model)
    assert_same(dropping(model), dropping(model, fused=False))
