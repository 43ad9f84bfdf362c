"""Fused LoRA layers against PEFT's own forward, with and without dropout: results, gradients, what is left to PEFT."""

import copy
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import tiny
import torch
from calls import watched
from operations import kept_bytes
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from tolerance import assert_float32, assert_gradients, differs
from torch import nn

from trl_packfa import check, describe, patch, unpatch
from trl_packfa.kernels.lora import projections
from trl_packfa.kernels.lora.dropout import Dropout
from trl_packfa.kernels.lora.layers import Layers, chunk_size
from trl_packfa.kernels.lora.projections import read
from trl_packfa.patching import mixers

EVERYWHERE = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
RATES = pytest.mark.parametrize("rate", [0.0, 0.3], ids=["no dropout", "dropout"])


def adapted(architecture="llama", *, base=None, seed=0, **lora):
    base = tiny.model(architecture, layers=2) if base is None else base
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(**{**EVERYWHERE, **lora}))
    return model.train()


def patch_beside_peft(model):
    """Patch a model and leave its LoRA layers to PEFT. Other kernels stay ours, so that bits can be compared."""
    own = mixers.lora_overrides
    with mock.patch.object(
        mixers, "lora_overrides", lambda backbone, *, fused, **given: own(backbone, fused=False, **given)
    ):
        return patch(unpatch(model))


def run(model, *, fused, context=nullcontext, seed=7):
    """Logits of the packed documents, and the gradients of the adapters; a seed's masks are dropped."""
    patched = patch(unpatch(model)) if fused else patch_beside_peft(model)
    torch.manual_seed(seed)
    return tiny.logits_and_gradients(patched, context=context)


def oracle(model):
    return run(copy.deepcopy(unpatch(model)).double(), fused=False)


def by_peft(model):
    return run(model, fused=False)


def assert_like_peft(model, *, truth=oracle):
    """Tier 3 with the same masks, that something was fused at all, and that other masks give something else."""
    exact, exact_grads = truth(model)
    (expected, expected_grads), (logits, grads) = by_peft(model), run(model, fused=True)
    assert not torch.equal(logits, expected), "nothing was fused"
    assert_float32(logits, exact)
    assert grads.keys() == expected_grads.keys()
    assert_gradients(grads, exact_grads)
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        others, other_grads = run(model, fused=True, seed=8)
        assert differs(others, exact) and all(differs(grad, exact_grads[name]) for name, grad in other_grads.items())


def assert_same(found, expected):
    """To the bit."""
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    assert all(torch.equal(grad, expected[1][name]) for name, grad in found[1].items())


@pytest.mark.parametrize(("architecture", "rate"), [
    *[(name, 0.0) for name in ("llama", "phi", "phi3", "qwen3", "gemma2", "bloom")],
    *[(name, 0.3) for name in ("llama", "phi", "phi3", "gemma2")],
])  # fmt: skip
def test_results_and_gradients_are_pefts(architecture, rate):
    model = adapted(architecture, lora_dropout=rate)
    assert_like_peft(model)
    assert "LoRA: fused" in describe(model)


@RATES
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["up_proj", "o_proj"]])
def test_layers_without_an_adapter_take_part(targets, rate):
    assert_like_peft(adapted(target_modules=targets, use_rslora=True, lora_dropout=rate))


def test_frozen_factors_get_no_gradient():
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    assert_like_peft(model)


@pytest.mark.parametrize("chunk", [None, 16])
@RATES
@pytest.mark.parametrize(("use_reentrant", "trains_inputs"), [(True, True), (False, True), (False, False)])
def test_gradient_checkpointing_changes_no_bit(use_reentrant, trains_inputs, rate, chunk, monkeypatch):
    """Layers draw the same masks again. The control is a checkpoint that does not put the random state back."""
    if chunk is not None:
        monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    expected, model = run(adapted(lora_dropout=rate), fused=True), adapted(lora_dropout=rate)
    if trains_inputs:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(run(model, fused=True), expected)
    if rate:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, "preserve_rng_state": False})
        logits, grads = run(model, fused=True)
        assert torch.equal(logits, expected[0])
        assert any(differs(grad, expected[1][name]) for name, grad in grads.items())


@pytest.mark.parametrize(("use_reentrant", "again"), [(False, 3), (True, 4)])
def test_a_checkpoint_computes_no_last_product_again(use_reentrant, again, monkeypatch):
    """A layer's last product (`down_proj`) is not computed again, as no backward needs its result; the
    control is a reentrant checkpoint, which runs the whole layer."""
    expected, calls = run(adapted(), fused=True), watched(monkeypatch, Layers, "apply")
    model = adapted()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    found = run(model, fused=True)
    assert len(calls) == 2 * (4 + again)
    assert_same(found, expected)


@RATES
@pytest.mark.parametrize("chunk", [7, 16])
def test_rows_longer_than_a_chunk(chunk, rate, monkeypatch):
    monkeypatch.setattr("trl_packfa.kernels.lora.products.chunk_size", lambda *_: chunk)
    assert_like_peft(adapted(lora_dropout=rate))


def test_chunks_stay_small_where_memory_is_mapped_afresh():
    cpu = torch.device("cpu")
    assert [chunk_size(features, cpu, torch.float32) for features in (512, 4096, 14_336)] == [4096, 2048, 1024]
    assert chunk_size(4096, cpu, torch.bfloat16) == 4096


def two_adapters(model):
    model.add_adapter("second", LoraConfig(**EVERYWHERE))
    model.base_model.set_adapter(["default", "second"])


def hook(model):
    for module in model.modules():
        if type(module).__name__ == "Linear":
            module.register_forward_hook(lambda *_: None)


def set_forward(model):
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.forward = partial(module.forward)


def train_bases(model):
    for name, parameter in model.named_parameters():
        if name.endswith(("base_layer.weight", "base_layer.bias")):
            parameter.requires_grad_(True)


def mark_as_in_parts(model):
    """As DeepSpeed ZeRO-3 does, before its engine hooks the layers."""
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape


def drop(module, model):
    for layer in model.modules():
        if "lora_dropout" in vars(layer).get("_modules", {}):
            layer.lora_dropout["default"] = copy.deepcopy(module)


@pytest.mark.parametrize(("lora", "change", "reason"), [
    ({"use_dora": True}, None, "a variant of LoRA (DoraLinearVariant)"),
    ({"lora_bias": True}, None, "lora_bias=True"),
    ({}, two_adapters, "2 adapters active at once"),
    ({}, hook, "hooks on the layer"),
    ({}, set_forward, "a forward that was set on it"),
    ({}, train_bases, "the base layer is trained too"),
    ({}, mark_as_in_parts, "weights in parts (DeepSpeed ZeRO-3)"),
    ({}, partial(drop, nn.Dropout(1.0)), "lora_dropout=Dropout(p=1.0"),
    ({}, partial(drop, nn.AlphaDropout(0.1)), "lora_dropout=AlphaDropout(p=0.1"),
    ({"base": "int8"}, None, "Linear8bitLt computes its product in its own way"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_is_left_to_peft_is_pefts_to_the_bit_and_described(lora, change, reason, tmp_path):
    if "base" in lora:
        lora = {"base": tiny.quantized(tmp_path, {"load_in_8bit": True, "llm_int8_threshold": 0.0})}
    model = adapted(**lora)
    if change is not None:
        change(model)
    expected, found = by_peft(model), run(model, fused=True)
    assert reason in describe(model)
    assert_same(found, expected)


def packed(model):
    with torch.no_grad():
        return model(**tiny.batch(tiny.documents())).logits


def test_adapters_switched_under_the_patch():
    model, plain = (adapted().eval() for _ in range(2))
    patch(model)
    patch_beside_peft(plain)
    for each in (model, plain):
        torch.manual_seed(1)
        each.add_adapter("second", LoraConfig(**{**EVERYWHERE, "r": 2}))
    first = packed(model)
    for each in (model, plain):
        each.set_adapter("second")
    assert differs(packed(model), first)
    assert_float32(packed(model), packed(plain))
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(packed(model), packed(plain))
    for each in (model, plain):
        each.merge_adapter()
    assert torch.equal(packed(model), packed(plain))
    assert "adapters disabled, merged or not active" in describe(model)


def test_a_wrong_scaling_is_seen():
    """Negative control of every comparison here."""
    model = adapted()
    expected, expected_grads = run(model, fused=False)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 1.5 * value for name, value in module.scaling.items()}
    logits, grads = run(model, fused=True)
    assert differs(logits, expected)
    assert all(differs(grad, expected_grads[name]) for name, grad in grads.items())


def test_adapters_are_saved_and_loaded_by_peft(tmp_path):
    model = patch(adapted().eval())
    expected = packed(model)
    model.save_pretrained(tmp_path)
    loaded = patch(PeftModel.from_pretrained(tiny.model(layers=2), tmp_path).eval())
    assert torch.equal(packed(loaded), expected)


def test_calls_that_are_not_packed_and_unpatched_models_are_pefts_bit_for_bit():
    model, ids = adapted(), tiny.documents()[0][None]
    before, forwards = model(input_ids=ids).logits, {name: dict(vars(m)) for name, m in model.named_modules()}
    patch(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    unpatch(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert all("forward" not in vars(m) or "forward" in forwards[name] for name, m in model.named_modules())


def test_adapters_that_come_after_the_patch_are_fused_by_the_next_patch():
    base = patch(tiny.model(layers=2))
    model = patch(adapted(base=base))
    assert "LoRA: fused" in describe(model)
    assert "LoRA: PEFT's own forward (fused_kernels=False)" in describe(patch(model, fused_kernels=False))


def test_compiled_models_run():
    model = patch(adapted().eval())
    compiled = torch.compile(model, backend="eager")
    assert_float32(compiled(**tiny.batch(tiny.documents())).logits, packed(model))


def test_fewer_activations_are_kept():
    model, kept = adapted(), []
    for fused in (True, False):
        patch(unpatch(model), fused_kernels=fused)
        kept.append(kept_bytes(model, partial(model, **tiny.batch(tiny.documents()))))
    assert kept[0] < 0.8 * kept[1]


RATE = 0.3


def test_layers_with_other_rates_equal_peft():
    model = adapted(lora_dropout=RATE)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.lora_dropout["default"] = nn.Identity()
        layer.self_attn.v_proj.lora_dropout["default"] = nn.Dropout(0.6)
        layer.mlp.gate_proj.lora_dropout["default"].eval()
    assert_like_peft(model)


@pytest.mark.parametrize("by_autocast", [False, True])
def test_a_forward_without_gradients_draws_pefts_masks(by_autocast):
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16) if by_autocast else nullcontext

    def logits(fused):
        model = (patch if fused else patch_beside_peft)(adapted(lora_dropout=RATE))
        torch.manual_seed(7)
        with torch.no_grad(), context():
            return model(**tiny.batch(tiny.documents())).logits, torch.get_rng_state()

    (ours, our_state), (pefts, pefts_state) = logits(True), logits(False)
    assert torch.equal(our_state, pefts_state) and not torch.equal(ours, pefts)
    assert by_autocast or assert_float32(ours, pefts) is None


def test_a_step_leaves_the_random_state_where_peft_leaves_it():
    model, states = adapted(lora_dropout=RATE), []
    for fused in (True, False):
        run(model, fused=fused)
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
