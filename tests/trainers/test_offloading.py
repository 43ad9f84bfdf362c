"""Options of TRL that change how a model computes: activation offloading, which the CPU stands in for, Liger, and
checkpoints that save the results of attention (`selective=True`)."""

from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from pretended import pretend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from training import arguments, lora_config, losses, packed_trainer
from transformers import TrainerCallback
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer import sft_trainer

from trl_packfa.attention.reference import ReferenceBackend
from trl_packfa.errors import InvalidConfig
from trl_packfa.patching.state import find_state
from trl_packfa.trainers.requirements import runs
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


class Attention(TorchDispatchMode):
    """Counts calls of torch's kernel for a CPU."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += str(func) == "aten._scaled_dot_product_flash_attention_for_cpu.default"
        return func(*args, **(kwargs or {}))


class InSteps(TrainerCallback):
    """Runs the forwards and backwards of steps in a mode."""

    def __init__(self, mode):
        self.mode = mode

    def on_step_begin(self, args, state, control, **kwargs):
        self.mode.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.mode.__exit__(None, None, None)


def train(out, *callbacks, adapted=True, **options):
    """Train one step; return its loss."""
    options |= {"gradient_checkpointing": True, "use_peft": adapted, "max_steps": 1, "check_packing": False}
    args = arguments(out=out, **options)
    trainer = packed_trainer(args, callbacks=list(callbacks), **({} if adapted else {"peft_config": None}))
    trainer.train()
    assert set(find_state(trainer.model).backends.resolved.values()) == {args.attention_backend}
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("adapted", [True, False])
def test_selective_checkpoints_compute_attention_once(tmp_path, adapted):
    plain, selective, options = Attention(), Attention(), {"adapted": adapted, "attention_backend": "sdpa"}
    loss = train(tmp_path, InSteps(plain), **options)
    same = train(tmp_path, InSteps(selective), gradient_checkpointing_kwargs={"selective": True}, **options)
    assert plain.calls == 2 * selective.calls > 0 and same == loss


def test_selective_checkpoints_save_the_operator_of_varlen(tmp_path, monkeypatch):
    """The stand-in runs inside one of our operators, forward and in its backward: twice a layer, not three times."""
    pretend(monkeypatch, "varlen")
    calls, attend, losses = [], ReferenceBackend.__call__, []
    monkeypatch.setattr(ReferenceBackend, "__call__", lambda self, *call: calls.append(1) or attend(self, *call))
    counts = []
    for kwargs in (None, {"selective": True}):
        calls.clear()
        losses.append(train(tmp_path, attention_backend="varlen", bf16=True, gradient_checkpointing_kwargs=kwargs))
        counts.append(len(calls))
    assert counts[0] / 3 == counts[1] / 2 > 0 and losses[0] == losses[1]


def test_checkpoints_of_every_second_layer_are_the_trainers(tmp_path):
    """The check's switch takes out of the arguments what torch does not take, as the Trainer's does."""
    modes = [Attention(), Attention()]
    for n, mode in enumerate(modes, start=1):
        train(tmp_path, InSteps(mode), attention_backend="sdpa", gradient_checkpointing_kwargs={"every_n_layers": n})
    assert modes[0].calls / 4 == modes[1].calls / 3 > 0, "of two layers, one is computed twice"


def saving(*operators):
    """Return arguments of checkpoints that save these operators."""
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, list(operators))}


def test_an_own_policy_may_save_operators_outside_of_fused_lora(tmp_path):
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    plain, selective, products = Attention(), Attention(), saving(torch.ops.aten.mm.default)
    loss = train(tmp_path, InSteps(plain), attention_backend="sdpa", gradient_checkpointing_kwargs=products)
    own = saving(attention)
    same = train(tmp_path, InSteps(selective), attention_backend="sdpa", gradient_checkpointing_kwargs=own)
    assert plain.calls == 2 * selective.calls > 0 and same == loss


def test_a_policy_that_saves_products_in_place_is_refused(tmp_path, monkeypatch):
    own = {"gradient_checkpointing_kwargs": saving(torch.ops.aten.mm.out), "attention_backend": "sdpa"}
    with pytest.raises(InvalidConfig, match=r"saves aten\.mm\.out(.|\n)*in place(.|\n)*fused_kernels=False"):
        train(tmp_path, **own)
    assert train(tmp_path, fused_kernels=False, **own) == train(tmp_path, adapted=True, attention_backend="sdpa")
    assert train(tmp_path, adapted=False, **own)
    monkeypatch.setattr(runs, "_saves_products_in_place", lambda run: [])
    with pytest.raises(RuntimeError, match="has been mutated"):  # what torch would say, in the first backward
        train(tmp_path, **own)
