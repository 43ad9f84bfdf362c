"""Fused LoRA while torch.compile traces: one operator for each input, PEFT's results and gradients."""

import os
import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import tiny
import torch
from selection import exhaustive, in_full
from test_fused_lora import adapted, by_peft, oracle
from tolerance import assert_float32, assert_gradients, assert_no_worse, assert_recomputed

from trl_packfa import patch, unpatch
from trl_packfa.bench.measuring import compiled_graphs
from trl_packfa.kernels.lora import in_graphs, project_together
from trl_packfa.patching.apply import compile_layers

# Query, key and value; output; gate and up; down.
OPERATORS_OF_A_LAYER = 4


@pytest.fixture
def calls(monkeypatch):
    counted = dict.fromkeys(("project_forward", "project_backward"), 0)
    for name in counted:
        own = getattr(in_graphs, name)

        def run(*args, name=name, own=own, **kwargs):
            counted[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(in_graphs, name, run)
    return counted


def run(model, *, whole, context=nullcontext, backend="aot_eager"):
    """Logits of the packed documents, and the gradients of the adapters, compiled."""
    patch(unpatch(model))
    if whole:
        return tiny.logits_and_gradients(model, forward=torch.compile(model, backend=backend), context=context)
    compile_layers(model, backend=backend)
    return tiny.logits_and_gradients(model, context=context)


@pytest.mark.parametrize("whole", [False, *exhaustive(True)], ids=["by layer", "whole"])
@pytest.mark.parametrize("options", [{}, *in_full({"target_modules": ["q_proj", "v_proj", "down_proj"]})],
                         ids=["all", "some"])  # fmt: skip
def test_fused_lora_in_graphs_equals_pefts(whole, options, calls):
    model = adapted(**options)
    (exact, exact_grads), (logits, grads) = oracle(model), run(model, whole=whole)
    assert_float32(logits, exact)
    assert_gradients(grads, exact_grads)
    layers = 2 * OPERATORS_OF_A_LAYER
    # Of `some`, the output projection and gate and up have no adapter.
    expected = layers if not options else 2 * 2
    assert calls == {"project_forward": expected, "project_backward": expected}


@pytest.mark.parametrize("autocast", [True, *in_full(False)], ids=["autocast", "weights"])
def test_bfloat16_is_no_further_from_the_truth_than_pefts(autocast, calls):
    context = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else nullcontext
    model = adapted() if autocast else adapted().to(torch.bfloat16)
    exact = oracle(model)
    with context():
        expected = by_peft(model)
    found = run(model, whole=False, context=context)
    assert calls["project_backward"] == 2 * OPERATORS_OF_A_LAYER
    assert_no_worse(found, expected, exact)


@pytest.mark.slow
@pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
                    reason="torch's inductor needs a C++ compiler on a CPU")  # fmt: skip
@pytest.mark.parametrize("reentrant", [True, *exhaustive(False)])
def test_inductor_under_autocast_with_checkpoints(reentrant, calls):
    """As most runs on a GPU that compile: the backward computes every layer's forward again, but for the down
    projection, whose result nothing in a layer's backward reads."""
    context = partial(torch.autocast, "cpu", torch.bfloat16)
    model = adapted()
    model.enable_input_require_grads()
    exact = oracle(model)
    with context():
        expected = by_peft(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = run(model, whole=False, context=context, backend="inductor")
    layers = 2 * OPERATORS_OF_A_LAYER
    assert calls == {"project_forward": 2 * layers - 2, "project_backward": layers}
    assert_no_worse(found, expected, exact)


@pytest.mark.slow
def test_a_bias_counts():
    model = adapted("qwen2")  # of query, key and value
    exact, _ = oracle(model)
    assert_float32(run(model, whole=False)[0], exact)


def test_no_batch_after_the_first_compiles_anything(calls):
    model = patch(adapted())
    compile_layers(model, backend="aot_eager")
    seen = []
    for seed, lengths in enumerate(((13, 1, 29), (40,), (2, 30, 3, 3, 18, 5), (60, 5))):
        model(**tiny.batch(tiny.documents(lengths, seed=seed))).logits.square().mean().backward()
        seen.append(compiled_graphs())
    assert seen == [2] * 4, "a layer's, and the first layer's, whose input trains nothing"
    assert calls["project_backward"] == 4 * 2 * OPERATORS_OF_A_LAYER


@pytest.mark.parametrize("change", ["dropout", *in_full("disabled"), *exhaustive("fused_kernels=False")])
def test_what_is_not_fused_runs_pefts_own_forward(change, calls):
    """The control of the counts above."""
    model = patch(
        adapted(**({"lora_dropout": 0.5} if change == "dropout" else {})), fused_kernels="fused" not in change
    )
    compile_layers(model, backend="aot_eager")
    with model.disable_adapter() if change == "disabled" else nullcontext():
        model(**tiny.batch(tiny.documents())).logits.sum()
    assert not any(calls.values())


@pytest.mark.slow
def test_4_bit_weights_run_pefts_own_forward(tmp_path, calls):
    model = adapted(base=tiny.quantized(tmp_path))
    (expected, expected_grads), (logits, grads) = by_peft(model), run(model, whole=False)
    assert not any(calls.values())
    assert_recomputed(logits, expected)
    assert_gradients(grads, expected_grads)


def test_a_projection_that_nothing_reads_has_no_gradient(calls):
    """As values whose attention is dropped: the others' are as they were."""
    model = patch(adapted())
    attention = model.get_base_model().model.layers[0].self_attn
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))

    def read(*names):
        layers = [getattr(attention, name) for name in names]
        forward = torch.compile(lambda x: project_together(x, *layers)[0][0], backend="aot_eager")
        factor = attention.q_proj.lora_A["default"].weight
        return torch.autograd.grad(forward(x).sum(), factor)[0]

    together = read("q_proj", "k_proj", "v_proj")
    assert calls == {"project_forward": 1, "project_backward": 1}
    assert_recomputed(together, read("q_proj"))


def test_lora_with_another_scale_gives_another_result_in_graphs():
    """The control of the comparisons."""
    model = adapted()
    exact, _ = oracle(model)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).mul_(1.01)
    with pytest.raises(AssertionError):
        assert_float32(run(model, whole=False)[0], exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_sound(dtype):
    """Schema, fake results and autograd, by torch's own checks; the second layer has no adapter, the first a bias."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, trains=False):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(trains)

    none = torch.empty(0, dtype=dtype)
    layers = ([drawn(6, 8), drawn(4, 8)], [drawn(6), none], [drawn(2, 8, trains=True), none],
              [drawn(6, 2, trains=True), none])  # fmt: skip
    for trains in (True, False):
        arguments = (drawn(9, 8, trains=trains), *layers, [0.5, 0.0], dtype, dtype)
        torch.library.opcheck(torch.ops.trl_packfa.project_together.default, arguments)
