"""Checkpoints that save the results of attention (TRL's `selective=True`), by how often attention is computed."""

from functools import partial

import pytest
import torch
from pretended import pretend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from training import arguments, packed_trainer
from transformers import TrainerCallback

from trl_packfa.attention.reference import ReferenceBackend
from trl_packfa.errors import InvalidConfig
from trl_packfa.patching.state import find_state
from trl_packfa.trainers.requirements import runs


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
