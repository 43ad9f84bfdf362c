"""Options of TRL that change how a model computes: activation offloading, which the CPU stands in for, and Liger."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from training import arguments, lora_config, losses, packed_trainer
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer import sft_trainer

from trl_packfa.trainers.sft import check_gate, model_code

RUNS = {
    "step": {"packing_strategy": "step", "gradient_accumulation_steps": 2},
    "bfd": {"packing_strategy": "bfd", "max_length": 128},
    "dropout": {"dropout": 0.3},
}


@pytest.fixture
def offloading(monkeypatch):
    """Let TRL move activations from the CPU to the CPU. Return how many it brings back, and a factor for them."""
    state = SimpleNamespace(moved=0, factor=1.0)

    def contexts(model):
        hooks = get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=1)
        unpack = hooks.unpack_hook

        def unpack_noted(number):
            was_moved, tensor = hooks.tracker[number][1], unpack(number)
            state.moved += was_moved
            return tensor * state.factor if was_moved and tensor.is_floating_point() else tensor

        hooks.unpack_hook = unpack_noted
        return hooks

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(sft_trainer, "get_act_offloading_ctx_manager", contexts)
    return state


def offloaded_losses(out, dropout=0.0, **options):
    adapter = lora_config()
    adapter.lora_dropout = dropout
    trainer = packed_trainer(arguments(out=out, check_packing=False, **options), peft_config=adapter)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("run", RUNS)
def test_offloaded_activations_train_the_same(run, tmp_path, offloading):
    expected = offloaded_losses(tmp_path, **RUNS[run])
    assert not offloading.moved
    assert offloaded_losses(tmp_path, activation_offloading=True, **RUNS[run]) == expected
    assert offloading.moved


def test_what_comes_back_is_what_the_backward_reads(tmp_path, offloading):
    """The control: activations that come back twice as large."""
    expected, offloading.factor = offloaded_losses(tmp_path), 2.0
    assert offloaded_losses(tmp_path, activation_offloading=True) != expected


@pytest.fixture
def events(monkeypatch):
    """A Liger that puts forwards on instances, as the real one does; when it is applied, checked, run."""
    events = []

    def forward(self, hidden_states):
        events.append("norm") if events[-1] != "norm" else None
        return type(self).forward(self, hidden_states)

    def apply(model, config):
        assert config == {"fused_linear_cross_entropy": False}, "TRL's choice"
        events.append("applied")
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = MethodType(forward, module)

    check = check_gate.check
    monkeypatch.setattr(model_code, "apply_liger_kernel", apply)
    too_late = "transformers.trainer.apply_liger_kernel"
    monkeypatch.setattr(too_late, lambda *args: pytest.fail("applied after the check"))
    monkeypatch.setattr(check_gate, "check", lambda *a, **k: events.append("checked") or check(*a, **k))
    return events


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
def test_liger_is_applied_once_and_checked(events):
    args = arguments(use_liger_kernel=True, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = packed_trainer(args, eval_dataset=packed_trainer(arguments()).train_dataset)
    assert events.index("applied") == 0, "before anything runs"
    trainer.train()
    assert "checked" in events and events[events.index("checked") + 1] == "norm", "the check runs Liger's forwards"
    assert events.count("applied") == 1 and trainer.check_report.is_exact and len(losses(trainer)) == 2
    assert trainer.args.use_liger_kernel, "as it was asked for: checkpoints say so"


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
def test_liger_that_is_not_installed_is_refused_by_transformers(monkeypatch):
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: False)
    with pytest.raises(ImportError, match=r"(?i)use_liger_kernel.*not available(.|\n)*pip install"):
        packed_trainer(arguments(use_liger_kernel=True))
