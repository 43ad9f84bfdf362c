"""`padding_free(trainer)`: TRL's own trainers, unmodified, train as they did, without padding."""

import copy

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from padded import masks_read, padded
from selection import exhaustive, in_full
from tolerance import CONTROL
from training import arguments, packed_trainer, slow_down
from trl_trainers import EXPERIMENTAL, STABLE, beyond, build, differences, encoder_decoder, run, tokenizer, train

import trl_packfa
from trl_packfa.errors import ContaminationError, InvalidConfig, NoBackend, UnsupportedModel
from trl_packfa.layout import padded_rows
from trl_packfa.patching.state import find_state

# Which models each of them runs besides the policy.
OTHERS = {
    "dpo": {"ref_model"}, "kto": {"ref_model"}, "grpo": {"ref_model", "reward_funcs[1]"},
    "rloo": {"ref_model", "reward_funcs[1]"}, "gkd": {"teacher_model"}, "distillation": {"teacher_model"},
    "online_dpo": {"ref_model", "reward_funcs[0]"}, "bema_dpo": {"ref_model"},
}  # fmt: skip
# TRL averages these over all positions, pads included.
OVER_PADS = {
    "orpo": {"logits/chosen", "logits/rejected"},
    "cpo": {"logits/chosen", "logits/rejected"},
    "online_dpo": {"objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"},
}


def free(trainer, **options):
    trl_packfa.padding_free(trainer, **options)
    return trainer, trainer.trl_packfa_padding_free


def freed(*args, **options):
    return trl_packfa.padding_free(build(*args, **options))


@pytest.mark.versions
@pytest.mark.parametrize("lora", [True, *exhaustive(False)], ids=["lora", "full"])
@pytest.mark.parametrize("kind", [*STABLE, *in_full(*EXPERIMENTAL)])
def test_a_padding_free_trainer_trains_as_padded(kind, lora, tmp_path, caplog):
    if kind == "bema_dpo" and lora:
        pytest.skip("follows whole weights")
    expected, _ = run(build, kind, tmp_path, lora=lora, max_steps=4)
    logs, trainer = run(freed, kind, tmp_path, lora=lora, max_steps=4)
    assert not beyond(expected, logs, besides=OVER_PADS.get(kind, ()))
    others = OTHERS.get(kind, set()) - ({"ref_model"} if lora else set())
    attached = trainer.trl_packfa_padding_free
    assert set(attached.models) == {"model"} | others
    assert attached.first_calls.keys() == attached.models.keys()  # each met a batch with pads, and was compared on it
    assert 0.1 < logs[-1]["padding_saved"] < 0.8 and logs[-1]["tokens_per_second"] > 0
    assert logs[-1]["documents"] == {"tpo": 24, **dict.fromkeys(("dpo", "reward", "orpo", "cpo", "bema_dpo"), 16),
                                     "online_dpo": 16}.get(kind, 8)  # fmt: skip
    told = [record.message for record in caplog.records if "averages" in record.message]
    assert bool(told) == (kind in OVER_PADS)


def join_rows(monkeypatch):
    one = trl_packfa.PackedLayout.from_lengths
    monkeypatch.setattr(padded_rows.PaddedRows, "layout", lambda rows, device: one([rows.num_tokens]))


def test_negative_control_rows_that_see_each_other_train_something_else(tmp_path, monkeypatch):
    expected = train(build("reward", tmp_path, max_steps=3))
    trainer, _ = free(build("reward", tmp_path, max_steps=3), check_first_batch=False)
    join_rows(monkeypatch)
    assert beyond(expected, train(trainer), only=("loss",), times=CONTROL)


def test_the_first_batch_is_compared(tmp_path, monkeypatch):
    trainer = freed("dpo", tmp_path, max_steps=1)
    join_rows(monkeypatch)
    with pytest.raises(ContaminationError, match=r"DPOTrainer\.model: the first batch without its pads is not exact"):
        trainer.train()


def test_a_loss_that_reads_pads_is_refused(tmp_path):
    class ReadingPads(trl.RewardTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            outputs = model(**{k: v for k, v in inputs.items() if k != "use_cache"}, output_hidden_states=True)
            return outputs.hidden_states[-1].mean()

    trainer, _ = free(build("reward", tmp_path, cls=ReadingPads, max_steps=1))
    said = r"ReadingPads\.model: the loss depends on what the model computes at a"
    with pytest.raises(ContaminationError, match=said):
        trainer.train()


@pytest.mark.parametrize("options", [{"precompute_ref_log_probs": True}, {"sync_ref_model": True,
                         "ref_model_sync_steps": 2}, {"gradient_checkpointing": True}, {"bf16": True},
                         {"loss_type": ["ipo", "sft"], "ld_alpha": None}, {"use_weighting": True},
                         {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
@pytest.mark.parametrize("lora", [False, *exhaustive(True)], ids=["full", "lora"])
def test_dpo_with_what_it_can_do(options, lora, tmp_path):
    if lora and "sync_ref_model" in options:
        pytest.skip("TRL syncs no adapter")
    expected = train(build("dpo", tmp_path, lora=lora, max_steps=3, **options))
    logs = train(freed("dpo", tmp_path, lora=lora, max_steps=3, **options))
    assert not beyond(expected, logs, dtype=torch.bfloat16 if "bf16" in options else torch.float32)


def test_evaluation_generation_copies_and_saving(tmp_path):
    padded_trainer, (trainer, _) = build("dpo", tmp_path, max_steps=2), free(build("dpo", tmp_path, max_steps=2))
    for one in (padded_trainer, trainer):
        train(one)
    evaluated = [one.evaluate() for one in (padded_trainer, trainer)]
    assert not beyond(evaluated[:1], evaluated[1:], only=("eval_loss",))
    batch = padded(tiny.documents(), "left")
    made = [one.model.generate(**batch, max_new_tokens=4, do_sample=False) for one in (padded_trainer, trainer)]
    assert torch.equal(*made)
    copied = copy.deepcopy(trainer.model)
    assert torch.equal(copied(**batch).logits, trainer.model(**batch).logits)
    trainer.save_model(str(tmp_path / "saved"))
    again = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert find_state(again) is None
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True))


def test_resuming_is_exact(tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    logs = train(freed("dpo", tmp_path, lora=True, **saving))
    again = train(freed("dpo", tmp_path, lora=True, **saving), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["loss"] for entry in again] == [entry["loss"] for entry in logs]
    assert [entry["documents"] for entry in again] == [16] * 4


def test_rows_come_from_the_collator_and_masks_are_not_read_again(tmp_path, monkeypatch):
    trainer, read = freed("dpo", tmp_path, max_steps=2), masks_read(monkeypatch)
    train(trainer)
    assert len(read) == 3  # by the collator: two steps, and the batch that is fetched ahead; by no model


def test_all_models_or_none(tmp_path):
    trainer = build("grpo", tmp_path, lora=True)
    trainer.reward_funcs[1] = encoder_decoder()
    with pytest.raises(UnsupportedModel, match=r"GRPOTrainer\.reward_funcs\[1\] cannot run without its pads; none of"):
        trl_packfa.padding_free(trainer)
    assert find_state(trainer.model) is None
    trl_packfa.padding_free(trainer, leave_padded=["reward_funcs[1]"])
    assert find_state(trainer.model) is not None
    assert trl_packfa.padding_free(trainer) is trainer
    dpo, _ = free(build("dpo", tmp_path))
    trl_packfa.unpatch(dpo.ref_model)
    with pytest.raises(UnsupportedModel, match=r"DPOTrainer\.ref_model is no longer patched to run without pads"):
        dpo.train()


def test_a_refusal_leaves_every_model_patched_as_it_was(tmp_path):
    trainer = build("grpo", tmp_path)
    trl_packfa.patch(trainer.model)
    trl_packfa.patch(trainer.ref_model, unpad=True)
    before, of_reference = find_state(trainer.model), find_state(trainer.ref_model)
    trainer.reward_funcs[1] = encoder_decoder()
    with pytest.raises(UnsupportedModel, match="none of the trainer's models was changed"):
        trl_packfa.padding_free(trainer)
    state = find_state(trainer.model)
    assert state is before and state.unpadding is None
    assert find_state(trainer.ref_model) is of_reference and of_reference.unpadding.generates
    packed = trl_packfa.patch(tiny.model(layers=1))
    with pytest.raises(NoBackend):
        trl_packfa.patch(packed, backend="none such")
    assert find_state(packed) is not None


def test_padding_free_called_again_takes_the_new_arguments(tmp_path):
    trainer, attached = free(build("dpo", tmp_path, max_steps=1))
    assert trl_packfa.padding_free(trainer, share_prefixes=True).trl_packfa_padding_free is attached
    assert attached.shares and trainer.data_collator.share_prefixes and find_state(trainer.model).unpadding.sharing
    assert not hasattr(trainer.data_collator.collator, "share_prefixes")  # counted once
    trl_packfa.unpatch(trainer.ref_model)
    trl_packfa.padding_free(trainer, leave_padded=["model"])
    assert find_state(trainer.model) is None and list(attached.models) == ["ref_model"]
    logs = train(trainer)[-1]
    assert logs["padding_saved"] > 0.1 and "tokens_per_second" not in logs
    assert trainer.callback_handler.callback_list.count("PaddingFreeRun") == 1


def test_evaluation_is_no_training(tmp_path, monkeypatch):
    """Neither its time nor its pads are counted."""
    clock = [0.0]
    monkeypatch.setattr("trl_packfa.trainers.padding_free.run.time.perf_counter", lambda: clock[0])

    slow_down(monkeypatch, trl.DPOTrainer, clock, training_step=1.0, evaluate=1000.0, _save_checkpoint=1000.0)
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    trainer, _ = free(build("dpo", tmp_path, save_steps=1, **options))
    logs = train(trainer)
    tokens = [entry["num_tokens"] for entry in logs]
    assert [entry["tokens_per_second"] for entry in logs] == [tokens[0], tokens[1] - tokens[0]]
    trainer, _ = free(build("dpo", tmp_path, **{**options, "eval_strategy": "no"}))
    assert [entry["padding_saved"] for entry in train(trainer)] == [entry["padding_saved"] for entry in logs]


def test_a_model_whose_config_asks_for_tuples():
    """The check reads outputs by their names."""
    model = tiny.model(layers=1)
    model.config.return_dict = False
    trl_packfa.patch(model, unpad=True)
    assert trl_packfa.check(model).verdict == "exact" and model.config.return_dict is False


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="takes a trainer with a model, got LlamaForCausalLM"):
        trl_packfa.padding_free(tiny.model())
    trainer = build("dpo", tmp_path)
    trainer.second = trainer.model  # the same again
    with pytest.raises(InvalidConfig, match=r"names teacher, but this DPOTrainer holds model, ref_model\b"):
        trl_packfa.padding_free(trainer, leave_padded=["teacher"])
    with pytest.raises(InvalidConfig, match="leave_padded names all models of this RewardTrainer: model"):
        trl_packfa.padding_free(build("reward", tmp_path), leave_padded=("model",))
    trainer = build("dpo", tmp_path)
    trainer.args.use_liger_kernel = True
    with pytest.raises(InvalidConfig, match="DPOTrainer with use_liger_kernel=True cannot run without its pads"):
        trl_packfa.padding_free(trainer)
    trainer = build("dpo", tmp_path)
    trainer._is_vision_dataset = True
    with pytest.raises(UnsupportedModel, match="the trainer trains on images"):
        trl_packfa.padding_free(trainer)
    trainer = build("grpo", tmp_path)  # before anything is generated
    trainer.train_dataset = trainer.train_dataset.add_column("image", [0] * len(trainer.train_dataset))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM runs only text without its pads"):
        trl_packfa.padding_free(trainer)
    assert find_state(trainer.model) is None
    with pytest.raises(InvalidConfig, match="PackedSFTTrainer packs its batches already"):
        trl_packfa.padding_free(packed_trainer())


def test_padding_free_in_dpos_config_is_what_it_says(tmp_path, caplog):
    """TRL 1.16 warns and pads; `padding_free` then does what was asked."""
    assert train(freed("dpo", tmp_path, padding_free=True, max_steps=1))[0]["padding_saved"] > 0.1
    assert any("padding_free=True" in record.message for record in caplog.records)


def test_rows_of_pads_alone_and_batches_without_pads(tmp_path):
    even = [{"prompt": "1 2 ", "chosen": "3 4", "rejected": "5 6"}] * 16
    args = arguments(trl.DPOConfig, tmp_path, max_steps=1)
    trainer = trl.DPOTrainer(tiny.model(layers=1), ref_model=tiny.model(layers=1), args=args,
                             train_dataset=Dataset.from_list(even), processing_class=tokenizer())  # fmt: skip
    free(trainer)
    assert train(trainer)[0]["padding_saved"] == 0


def test_negative_control_another_kl_is_another_run():
    """It is compared with the log-probabilities that it is a difference of, and no more is forgiven."""
    logs = [{"loss": 0.5, "kl": 0.01, "logps/chosen": -200.0}]
    assert differences(logs, [{**logs[0], "kl": 0.010_02}])["kl"] <= 1
    assert differences(logs, [{**logs[0], "kl": 0.02}])["kl"] > 1
    assert differences(logs, [{**logs[0], "logps/chosen": -199.9}])["logps/chosen"] > 1
