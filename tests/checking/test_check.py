"""The check must pass what is exact, catch what is not, and say so when it cannot tell."""

import json

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from selection import exhaustive
from tolerance import VISIBLE

from trl_packfa import check, patch, unpatch
from trl_packfa.attention.sdpa import SdpaBackend
from trl_packfa.checking import check_unpadding, engine, subject, unpadding
from trl_packfa.checking.compare import largest, share
from trl_packfa.checking.probe import Probe
from trl_packfa.comparison import Comparison
from trl_packfa.config.options import PatchOptions
from trl_packfa.errors import ContaminationError, UnsupportedModel
from trl_packfa.patches.registry import get_patch
from trl_packfa.patching.apply import apply_patch
from trl_packfa.patching.inspect import Target


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float32)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_exact_models_pass(architecture, dtype):
    report = check(patch(tiny.model(architecture).to(dtype)))
    assert report.verdict == "exact" and report["isolation"].difference == 0.0, str(report)
    assert report["control"].difference > VISIBLE
    report.require_exact()


def test_modes_random_states_and_gradients_are_left_as_they_were():
    model = patch(get_peft_model(tiny.model(), LoraConfig(target_modules="all-linear")))
    model.train()
    model.base_model.model.model.layers[0].eval()
    first, *others = model.parameters()
    first.grad = torch.ones_like(first)
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert check(model).is_exact
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert bool((first.grad == 1).all()) and all(p.grad is None for p in others)


@pytest.mark.slow
def test_the_model_is_checked_as_it_will_train():
    """Adapter, checkpointed layers and a compiled forward; nothing of it is left changed."""
    model = patch(get_peft_model(tiny.model(), LoraConfig(target_modules="all-linear")))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = torch.compile(model.train(), backend="eager")
    runs, norm = [], model.base_model.model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    report = check(compiled)
    assert report.verdict == "exact", str(report)
    assert report.training == "LORA, 29696 parameters train, gradient checkpointing, compiled"
    assert all(p.grad is None for p in model.parameters())
    with_recomputation = len(runs)
    model.gradient_checkpointing_disable()
    runs.clear()
    check(model)
    assert with_recomputation > len(runs), "checkpointed layers run again in the backward pass"


def test_gradients_that_overflow_are_measured_of_smaller_losses(monkeypatch):
    """float16 ends at 65,504: what a loss scaler does in training, the check does with its losses."""

    def steep(**options):
        model = tiny.model(layers=2).half()
        with torch.no_grad():
            model.lm_head.weight.mul_(1000.0)
            model.model.embed_tokens.weight.mul_(0.02)
        return patch(model, **options)

    report = check(steep(unpad=True))
    assert report.is_exact, report
    assert report["gradients"].difference > 0 and report["unpadding gradients"].difference > 0
    monkeypatch.setattr(subject, "_LEAST_SCALE", 1.0)
    report = check(steep())
    assert report.verdict == "differs" and report["gradients"].difference == float("inf")
    with pytest.raises(ContaminationError):
        steep(unpad=True)


@pytest.mark.parametrize("part", ["all", "head"])
def test_a_model_of_zeros_is_refused_in_words(part):
    """Its logits, and the gradients of its embeddings, are zero: nothing can be measured in units of them."""
    model = patch(tiny.model(layers=1))
    with torch.no_grad():
        for parameter in (model if part == "all" else model.lm_head).parameters():
            parameter.zero_()
    report = check(model)
    assert report.verdict == "no power" and report["control"].difference == 0
    with pytest.raises(ContaminationError, match="its weights are zero"):
        report.require_exact()


def test_nan_is_not_exact_and_a_model_without_a_patch_is_refused():
    model = patch(tiny.model(layers=1))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert not check(model).is_exact
    with pytest.raises(UnsupportedModel, match="not patched"):
        check(unpatch(model))


def test_a_share_of_nothing_and_numbers_that_are_not_finite():
    """The control: rounding that is finite raises the limit."""

    def holds(difference, noise):
        return Comparison.beside_rounding("parity", difference, noise, 1e-4).holds

    assert (share(0.0, 0.0), share(1e-9, 0.0), share(1.0, 2.0)) == (0.0, float("inf"), 0.5)
    assert holds(2e-4, 1e-3) and not holds(2e-4, 0.0)
    for bad in (float("nan"), float("inf")):
        assert not holds(bad, 1e-3) and not holds(2e-4, bad) and holds(0.0, bad)
    zeros, nan = torch.zeros(2), torch.tensor([0.0, float("nan")])
    assert largest([zeros, zeros], [zeros + 1, nan]) == largest([zeros, zeros], [nan, zeros + 1]) == float("inf")


def test_a_model_that_mixes_no_tokens_proves_nothing():
    model = patch(tiny.model())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.o_proj.bias.zero_()
    report = check(model)
    assert report.verdict == "no power"
    with pytest.raises(ContaminationError, match="removing the boundaries changed nothing") as error:
        report.require_exact()
    assert "o_proj.weight" in str(error.value) and "small random values" in str(error.value)
    with torch.no_grad():  # what the message says to do
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=1e-3)
    assert check(model).is_exact


def test_a_gradient_that_is_nan_in_packed_rows_alone_is_not_exact(monkeypatch):
    model, is_packed = patch(tiny.model()), [False]
    for name, own, packs in (("packed", Probe.packed, True), ("alone", Probe.alone, False)):

        def told(self, *args, own=own, packs=packs, **kwargs):
            is_packed[0] = packs
            return own(self, *args, **kwargs)

        monkeypatch.setattr(Probe, name, told)
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.register_hook(lambda gradient: gradient * float("nan") if is_packed[0] else gradient)
    assert not check(model).is_exact


@pytest.mark.parametrize("trains", [True, False])
def test_report_is_json_and_reads_well(trains):
    report = check(patch(tiny.model().requires_grad_(trains)))
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == report.verdict == "exact"
    assert str(report).startswith("exact: isolation 0.0e+00, parity ")
    assert report.versions["torch"] and report.seed == 0 and report.seconds > 0
    assert ("gradients" in report) == trains and report["input gradients"].difference == 0
    if trains:
        assert "[llama, level attention, sdpa, float32, all parameters train]" in str(report)
        assert [row[""] for row in report.table()] == ["yes"] * 6
    else:
        assert "gradients not measured" in str(report)


@pytest.mark.parametrize(("excess", "draws"), [(2.0, 5), (10.0, 1), (0.5, 1)])
def test_rounding_is_drawn_again_before_a_model_is_blamed_for_a_difference_near_its_limit(excess, draws, monkeypatch):
    judged, noises = engine._judged, []

    def at_first(*measured):
        found = judged(*measured)
        noises.append(measured[-1])
        forward = found.forward._replace(difference=1e-4, allowed=1e-4 / excess)
        return found._replace(forward=forward) if len(noises) == 1 else found

    drawn, before, draw, compare = [], [], engine._rounding, engine.compare
    monkeypatch.setattr(engine, "_rounding", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    monkeypatch.setattr(unpadding, "compare", lambda *args: before.append(len(drawn)) or compare(*args))
    monkeypatch.setattr(engine, "_judged", at_first)
    model = tiny.model(layers=1)
    apply_patch(Target.of(model), get_patch(model.config), PatchOptions(unpad=True))
    report = check_unpadding(model)
    assert before[:2] == [0, draws]
    if draws > 1:
        of_reference = [value * engine._REFERENCE_SHARE for value in drawn.pop(draws - 1).gradients]
        same = [*(noise.gradients for noise in drawn[: draws - 1]), of_reference]
        assert noises[1].gradients == list(map(max, *same))
        assert report.verdict == "exact" and report["unpadding"].of == "padded"


@pytest.mark.parametrize("by", [1.0, 1e4])
def test_a_difference_near_its_limit_is_compared_with_the_rounding_of_both_ways(by, monkeypatch):
    """Documents alone may round more than packed ones, as their attention runs in another kernel. In bfloat16,
    RoBERTa's keys gave a false alarm on a CPU."""
    attend, rounding, ways = SdpaBackend.__call__, engine._rounding, []

    def measured(subject, way, *given):
        ways.append(way)
        noise = rounding(subject, way, *given)
        factor = 1 if way is ways[0] else by  # of the reference
        layers = {key: value * factor for key, value in noise.layers.items()}
        return noise._replace(layers=layers, gradients=[value * factor for value in noise.gradients])

    monkeypatch.setattr(SdpaBackend, "__call__", lambda self, *given: attend(self, *given) * (1 + 1.5e-4))
    monkeypatch.setattr(engine, "_rounding", measured)
    report = check(patch(tiny.model(layers=2), backend="sdpa"))
    assert report.is_exact == (by > 1), str(report)
    assert ways[1:4] == ways[:1] * 3 and ways[4] is not ways[0]
