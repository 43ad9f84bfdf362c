"""Whether a LoRA layer can be fused is decided once: what makes the decision fall, and that nothing else does."""

import gc
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig
from test_fused_lora import EVERYWHERE, adapted, packed, run
from torch import nn

from trl_packfa import patch
from trl_packfa.kernels.lora import decisions, overrides
from trl_packfa.kernels.lora.decisions import Decision, decide
from trl_packfa.kernels.lora.projections import read, unsupported_reason


def query(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj


def add_second(model):
    model.add_adapter("second", LoraConfig(**{**EVERYWHERE, "r": 2}))


def second_is_active(model):
    add_second(model)
    model.set_adapter("second")


def second_is_active_too(model):
    query(model)._active_adapter.append("second")


def second_comes_later(model):
    """Its name was active before it was there."""
    query(model).update_layer("second", 2, lora_alpha=2, config=LoraConfig(lora_dropout=0.0, init_lora_weights=False))


def replace_weight(linear):
    linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)


class Another(nn.Linear):
    """Not torch's own."""


def replace_base(model):
    layer = query(model).base_layer
    other = Another(layer.in_features, layer.out_features, bias=False)
    query(model).base_layer = other.requires_grad_(False)


def give_bias(model):
    lora_B = query(model).lora_B["default"]
    lora_B.bias = nn.Parameter(torch.zeros(lora_B.out_features))


# Hooks, forwards, classes, containers and variants: `test_set_forwards.py`, by their results.
CHANGES = {
    "disabled": lambda m: query(m).enable_adapters(False),
    "merged": lambda m: query(m).merge(),
    "another adapter": second_is_active,
    "scaling": lambda m: query(m).set_scale("default", 7.0),
    "another dict of scalings": lambda m: setattr(query(m), "scaling", {"default": 7.0}),
    "dropout": lambda m: query(m).lora_dropout.update({"default": nn.Dropout(0.5)}),
    "dropout's share": lambda m: setattr(query(m).lora_dropout["default"], "p", 0.5),
    "dropout's mode": lambda m: query(m).lora_dropout.eval(),
    "the base trains": lambda m: query(m).base_layer.weight.requires_grad_(True),
    "a base of another kind": replace_base,
    "another base weight": lambda m: replace_weight(query(m).base_layer),
    "another factor": lambda m: replace_weight(query(m).lora_B["default"]),
    "a factor's bias": give_bias,
    "another dtype": lambda m: query(m).to(torch.bfloat16),
    "weights in parts": lambda m: setattr(query(m).lora_A["default"].weight, "ds_shape", (4, 8)),
    "input casting": lambda m: setattr(query(m), "cast_input_dtype_enabled", False),
}


def same(ours, theirs):
    return all(getattr(ours, f.name) is getattr(theirs, f.name) for f in fields(ours))


def assert_decided_anew(layer, before):
    after = decide(layer)
    assert after is not before
    assert (after is None) == (unsupported_reason(layer) is not None)
    assert after is None or same(after, read(layer))


@pytest.mark.parametrize("change", CHANGES)
def test_a_decision_falls_with_what_it_was_read_from(change):
    model = adapted()
    query(model).lora_dropout["default"] = nn.Dropout(0.0)
    before = decide(query(model))
    assert before is not None and decide(query(model)) is before
    CHANGES[change](model)
    assert_decided_anew(query(model), before)


@pytest.mark.parametrize(("names", "change"), [
    (["default"], second_is_active_too),
    (["default", "second"], second_comes_later),
], ids=["added to in place", "names one that comes later"])  # fmt: skip
def test_a_list_of_active_adapters_is_watched(names, change):
    model = adapted()
    query(model)._active_adapter = list(names)
    if change is second_is_active_too:
        add_second(model)
    before = decide(query(model))
    assert before is not None
    change(model)
    assert unsupported_reason(query(model)) == "2 adapters active at once"
    assert_decided_anew(query(model), before)


def test_what_can_be_fused_again_is():
    model = adapted()
    before = decide(query(model))
    with model.disable_adapter():
        assert decide(query(model)) is None
    assert same(decide(query(model)), before)


def test_a_4_bit_weights_layout_is_watched():
    """bitsandbytes turns it in place, on a CPU in evaluation."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    layer.requires_grad_(False)
    before = decide(layer)
    assert before is not None and decide(layer) is before
    layer.compute_dtype = torch.bfloat16
    assert_decided_anew(layer, before)
    layer.weight.quant_state.packing_format_for_cpu = True
    assert decide(layer) is None


def test_layers_are_asked_once(monkeypatch):
    """Not in every step; the control never lets a decision stand."""
    asked = []
    monkeypatch.setattr(decisions, "unsupported_reason", lambda module: asked.append(module))
    model = patch(adapted())
    for _ in range(3):
        packed(model)
    assert len(asked) == 2 * 7
    monkeypatch.setattr(Decision, "stands", lambda self, module: False)
    packed(model)
    assert len(asked) == 2 * 2 * 7


def test_a_decision_that_stands_too_long_is_another_result(monkeypatch):
    """Negative control: the scaling that was decided on is used."""
    model = patch(adapted())
    first = packed(model)
    query(model).set_scale("default", 7.0)
    assert not torch.equal(packed(model), first)
    query(model).set_scale("default", 1.0)
    monkeypatch.setattr(Decision, "stands", lambda self, module: True)
    stale = packed(model)
    monkeypatch.undo()
    assert not torch.equal(packed(model), stale)


def test_no_model_is_kept():
    decisions._DECISIONS.clear()
    model = adapted()
    run(model, fused=True)
    assert len(decisions._DECISIONS) == 2 * 7 and overrides.decide is decide
    del model
    gc.collect()
    assert not len(decisions._DECISIONS)
