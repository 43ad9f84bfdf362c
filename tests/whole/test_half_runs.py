"""Runs in every pair of weights' dtype and mixed precision: right, or one sentence at construction."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from selection import exhaustive
from tiny_models import small_model
from tolerance import differs
from training import arguments, losses, packed_trainer, trained

from trl_packfa.config.requirements import require
from trl_packfa.errors import InvalidConfig, UnsupportedModel
from trl_packfa.trainers.requirements.built import BUILT
from trl_packfa.trainers.requirements.training import Training

FULL = {"use_peft": False, "learning_rate": 1e-4}


def run(out, dtype, *, full, **asked):
    args = arguments(out=out, **{**FULL, "use_peft": not full}, **asked)
    adapter = {"peft_config": None} if full else {}
    trainer = trained(packed_trainer(args, model=tiny.model(layers=2).to(dtype), **adapter))
    return torch.tensor(losses(trainer))


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory):
    return run(tmp_path_factory.mktemp("float32"), torch.float32, full=True)


# fp16 has no effect on a CPU, as the last test says.
@pytest.mark.parametrize("mixed", [{}, {"bf16": True}, *exhaustive({"fp16": True})], ids=["plain", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("dtype", "full"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["bfloat16-full", "bfloat16-lora", "float16-lora"],
)
def test_every_pair_of_dtypes_trains(dtype, full, mixed, in_float32, tmp_path):
    """To the losses of float32, as far as a first few steps are the same for adapter and model."""
    found = run(tmp_path, dtype, full=full, **mixed)
    assert found.isfinite().all() and not differs(found, in_float32)


@pytest.mark.parametrize("model_type", ["gpt2", "falcon"])
def test_dtypes_that_an_operator_does_not_take_together_are_one_sentence(model_type, tmp_path):
    """LayerNorm on a CPU takes no float16 weights with the bfloat16 that autocast makes."""
    model = small_model(model_type).half()
    said = r"with float16 weights does not run under bfloat16 autocast\.\n  - mixed dtype(.|\n)*dtype='float32' or "
    with pytest.raises(UnsupportedModel, match=said + "'bfloat16', or train without autocast"):
        packed_trainer(arguments(out=tmp_path, bf16=True, optim="sgd", **FULL), model=model, peft_config=None)
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(model_type).to(dtype)
        packed_trainer(arguments(out=tmp_path, bf16=True, **FULL), model=model, peft_config=None)


def test_trained_float16_weights_are_refused_where_adam_cannot_hold_them(tmp_path):
    """Fused, a loss as good as any, of steps too large; not fused, NaN after the first step."""
    said = r"\d+ trained weights are in float16: model.embed_tokens.weight(.|\n)*"
    said += r"'adamw_torch_fused' keeps its state in float16(.|\n)*dtype='float32'"
    with pytest.raises(InvalidConfig, match=said):
        run(tmp_path, torch.float16, full=True)
    assert run(tmp_path, torch.float16, full=True, optim="sgd").isfinite().all()
    model = tiny.model(layers=2).half()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    packed_trainer(arguments(out=tmp_path, **FULL), model=model, peft_config=None, optimizers=(optimizer, None))
    weight = torch.nn.Parameter(torch.full((4,), 0.1, dtype=torch.float16))  # the control
    weight.grad = torch.full((4,), 1e-4, dtype=torch.float16)
    torch.optim.AdamW([weight], lr=1e-4, fused=False).step()
    assert not weight.isfinite().any()


def test_a_scaled_loss_needs_float32_gradients(tmp_path):
    """torch: "Attempting to unscale FP16 gradients.", in the first step on an accelerator."""
    args, full, adapted = arguments(out=tmp_path, fp16=True), tiny.model(layers=1).half(), tiny.model(layers=1).half()

    def held(model, *, scales, own_optimizer):
        accelerator = SimpleNamespace(scaler=object() if scales else None)
        trainer = SimpleNamespace(accelerator=accelerator, optimizer=object() if own_optimizer else None)
        require(BUILT, Training(args, "a trainer", model=model, trainer=trainer))

    with pytest.raises(InvalidConfig, match=r"fp16=True scales the loss, and torch removes the scale from float32"):
        held(full, scales=True, own_optimizer=True)
    held(full, scales=False, own_optimizer=True)
    for parameter in adapted.parameters():
        parameter.requires_grad_(False)
    adapted.lm_head.weight = torch.nn.Parameter(adapted.lm_head.weight.float())
    held(adapted, scales=True, own_optimizer=False)


def test_fp16_on_a_cpu_says_that_it_does_nothing(tmp_path, caplog):
    packed_trainer(arguments(out=tmp_path))
    assert "fp16" not in caplog.text
    packed_trainer(arguments(out=tmp_path, fp16=True))
    assert caplog.text.count("fp16=True has no effect on a CPU") == 1
