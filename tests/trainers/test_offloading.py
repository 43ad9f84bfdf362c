"""TRL's activation offloading in packed training. It needs an accelerator: here the CPU stands in for one."""

from types import SimpleNamespace

import pytest
import torch
from training import arguments, lora_config, packed_trainer
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer import sft_trainer

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


def losses(out, dropout=0.0, **options):
    adapter = lora_config()
    adapter.lora_dropout = dropout
    trainer = packed_trainer(arguments(out=out, check_packing=False, **options), peft_config=adapter)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("run", RUNS)
def test_offloaded_activations_train_the_same(run, tmp_path, offloading):
    expected = losses(tmp_path, **RUNS[run])
    assert not offloading.moved
    assert losses(tmp_path, activation_offloading=True, **RUNS[run]) == expected
    assert offloading.moved


def test_what_comes_back_is_what_the_backward_reads(tmp_path, offloading):
    """The control: activations that come back twice as large."""
    expected, offloading.factor = losses(tmp_path), 2.0
    assert losses(tmp_path, activation_offloading=True) != expected
