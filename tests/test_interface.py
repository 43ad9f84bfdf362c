"""Every architecture that is packed through transformers' attention interface, as a small random model."""

import copy

import generic
import pytest
import tiny
import torch
from tolerance import GRADIENT_FACTOR, assert_low_precision
from transformers import PhimoeConfig, PhimoeForCausalLM

from trl_packfa import PackedLayout, check, describe, patch, registered, unpatch
from trl_packfa.errors import UnsupportedModel

INTERFACE = [name for name, patch in registered().items() if patch.rung == "interface"]
LENGTHS = (13, 1, 29, 7)


@pytest.mark.parametrize("model_type", INTERFACE)
def test_packed_is_exact_and_the_rest_untouched(model_type):
    model = generic.model(model_type)
    docs = tiny.documents(LENGTHS)
    ids = torch.cat(docs)[None]
    before = model(input_ids=ids).logits
    patch(model)
    report = check(model)
    assert report.verdict == "exact", str(report)
    assert report.control > 1e-2
    assert torch.equal(model(input_ids=ids).logits, before), "without boundaries, the unpatched model"
    assert_gradients_are_those_of_the_documents_alone(model, docs)
    unpatch(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert describe(model) == "not patched"


def assert_gradients_are_those_of_the_documents_alone(model, docs):
    """Against float64, at most three times as wrong as the unpatched model is, document by document, in float32."""
    ours = gradients(model, docs, lambda m: PackedLayout.from_lengths(LENGTHS).split(m(**tiny.batch(docs)).logits))
    alone = gradients(model, docs, documents_alone(docs))
    oracle_model = copy.deepcopy(model).double()
    oracle_model.set_experts_implementation("eager")  # the grouped products of experts have no float64
    exact = gradients(oracle_model, docs, documents_alone(docs))
    assert ours.keys() == alone.keys()
    for name, oracle in exact.items():
        unit = oracle.abs().max().clamp(min=1.0)
        assert_low_precision(ours[name] / unit, alone[name] / unit, oracle / unit, factor=GRADIENT_FACTOR)


def documents_alone(docs):
    return lambda model: [model(input_ids=ids[None]).logits[0] for ids in docs]


def gradients(model, docs, forward):
    """Of every trained parameter, for fixed random weights of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = forward(model)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in logits)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


@pytest.mark.parametrize("call", ["position_ids only", "all-ones mask", "use_cache"])
def test_boundaries_are_honoured_however_they_come(call):
    """gpt_oss: sinks, alternating windows, and a mask that transformers builds without position_ids."""
    model, docs = patch(generic.model("gpt_oss")), tiny.documents(LENGTHS)
    layout = PackedLayout.from_lengths(LENGTHS)
    extra = {"all-ones mask": {"attention_mask": torch.ones(1, sum(LENGTHS))}, "use_cache": {"use_cache": True}}
    batch = {"input_ids": torch.cat(docs)[None], "position_ids": layout.position_ids(), **extra.get(call, {})}
    assert torch.equal(model(**batch).logits, model(**tiny.batch(docs)).logits)


def test_gradient_checkpointing_carries_the_layout():
    def checkpointed_gradients(checkpointing):
        model = patch(generic.model("gpt_oss")).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**tiny.batch(tiny.documents(LENGTHS))).logits.sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for plain, checkpointed in zip(checkpointed_gradients(False), checkpointed_gradients(True), strict=True):
        assert torch.equal(plain, checkpointed)


def test_a_window_that_only_the_mask_knows_is_refused():
    """phimoe's attention is not told its window: without a mask it would see the whole document."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = PhimoeConfig(vocab_size=97, num_hidden_layers=1, num_local_experts=2, sliding_window=4, **sizes)
    from trl_packfa import Patch
    from trl_packfa.patching import apply_patch

    model = PhimoeForCausalLM(config)
    with pytest.raises(UnsupportedModel, match="limits attention to 4 tokens through its mask alone"):
        apply_patch(model, Patch(model_types=("phimoe",)), "auto")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_stateful_mixer_beside_the_attention_fails_the_check():
    """The interface reaches attention only; what else mixes tokens is caught by the check, not trained."""
    from trl_packfa import Patch
    from trl_packfa.patching import apply_patch

    model = generic.model("minimax")
    apply_patch(model, Patch(model_types=("minimax",)), "auto")
    report = check(model)
    assert report.verdict == "leak"
    assert report.first_leak is not None
