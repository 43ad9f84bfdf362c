"""Nothing of ours moves a global generator: after every part of a run it stands where TRL's own run leaves it, and a
run with dropout resumes bit for bit."""

import random

import numpy as np
import pytest
import torch
from peft import LoraConfig
from selection import exhaustive, in_turn
from tiny_models import small_model
from training import arguments, dataset, losses, packed_trainer, padded_trainer, trained
from transformers import TrainerCallback, set_seed
from trl import SFTConfig

from trl_packfa import PackedSFTConfig, check, patch, unpatch

OPTIONS = {
    "max_steps": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 96,
    "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4,
}  # fmt: skip


def states():
    name, keys, *place = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, keys.tolist(), *place), random.getstate()


class Recorder(TrainerCallback):
    def __init__(self):
        self.seen = []

    def record(self, place):
        self.seen.append((place, states()))


for event in ("train_begin", "epoch_begin", "step_end", "log", "evaluate"):

    def note(self, args, state, *_, event=event, **kwargs):
        self.record(f"{event} {state.global_step}")

    setattr(Recorder, f"on_{event}", note)


def recorded(make):
    """The states after construction, wherever the Trainer calls back, after an evaluation and at the end."""
    set_seed(7)
    trainer, recorder = make(), Recorder()
    recorder.record("construct")
    trainer.add_callback(recorder)
    trainer.train()
    trainer.evaluate()
    recorder.record("end")
    return recorder.seen, trainer


def packed(tmp_path, *, make=packed_trainer, config=PackedSFTConfig, **options):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    args, data = arguments(config, tmp_path, **{**OPTIONS, **options}), dataset(20)
    return make(args, train_dataset=data, eval_dataset=dataset(8, seed=5), peft_config=lora)


@pytest.mark.parametrize(("strategy", "sampling"), in_turn(["step", "minibatch"], ["random", "group_by_length"]))
def test_every_generator_stands_where_trls_run_leaves_it(tmp_path, strategy, sampling):
    options, trl = {"train_sampling_strategy": sampling}, {"make": padded_trainer, "config": SFTConfig}
    theirs, padded = recorded(lambda: packed(tmp_path / "trl", **trl, **options))
    ours, trainer = recorded(lambda: packed(tmp_path / "ours", packing_strategy=strategy, **options))
    assert trainer.check_report.is_exact and "mfu" in trainer.state.log_history[0], "everything of ours ran"
    assert [place for place, _ in ours] == [place for place, _ in theirs]
    moved = [place for (place, ours_), (_, theirs_) in zip(ours, theirs, strict=True) if ours_ != theirs_]
    assert not moved, f"not where TRL's are from {moved[0]!r} on"
    # The second and third epoch too hold the padded run's examples.
    tokens = [[h["num_tokens"] for h in t.state.log_history if "num_tokens" in h] for t in (trainer, padded)]
    assert tokens[0] == tokens[1]


def test_negative_control_a_draw_shows(tmp_path):
    class Draws(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.rand(())

    def make():
        trainer = packed(tmp_path)
        trainer.add_callback(Draws())
        return trainer

    theirs, _ = recorded(lambda: packed(tmp_path))
    ours, _ = recorded(make)
    assert next(place for (place, a), (_, b) in zip(ours, theirs, strict=True) if a != b) == "step_end 1"


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_rows_draw_what_a_padded_run_of_as_many_epochs_does(tmp_path, strategy):
    """Their steps are others; what is drawn once an epoch is not."""
    options = {"max_steps": 4, "num_train_epochs": 1, "eval_strategy": "no", "packing_strategy": strategy}
    ours, _ = recorded(lambda: packed(tmp_path, **options))
    places = dict(ours)
    assert places["step_end 1"] == places["step_end 2"] == places["log 2"]


@pytest.mark.parametrize("name", ["llama", "roformer", *exhaustive("mamba", "mixtral")])
def test_patch_and_check_leave_the_generators_alone(name):
    """Levels attention and document; in full module and interface."""
    model = small_model(name, num_hidden_layers=1)
    set_seed(7)
    before = states()
    check(patch(model))
    unpatch(model)
    assert states() == before


@pytest.mark.parametrize(("strategy", "bf16"), in_turn(["step", "bfd"], [True, False]))
def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path, strategy, bf16):
    def trainer_of(steps):
        args = arguments(out=tmp_path, max_steps=steps, save_strategy="steps", save_steps=2, logging_steps=1,
                         packing_strategy=strategy, max_length=96, gradient_accumulation_steps=2, bf16=bf16,
                         lr_scheduler_type="constant", check_packing=False)  # fmt: skip
        lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
        return packed_trainer(args, peft_config=lora)

    whole = trained(trainer_of(6))
    resumed = trained(trainer_of(6), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    ours, expected = ({n: p for n, p in t.model.named_parameters() if p.requires_grad} for t in (resumed, whole))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
