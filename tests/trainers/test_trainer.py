"""The trainer: the padded run's losses, every dataset format, everything counted, everything resumed."""

import pytest
import tiny
import torch
from peft import PeftModel, get_peft_model
from selection import in_full
from tolerance import assert_another_run, assert_trajectory, assert_weights
from training import arguments, batches_of, dataset, logs_of, lora_config, losses, packed_trainer, padded_trainer
from trl import SFTConfig

from trl_packfa import PackedSFTConfig, describe, unpatch
from trl_packfa.kernels.lm_head.chunked import Head


@pytest.mark.versions
@pytest.mark.parametrize("completion_only_loss", [True, *in_full(False)])
@pytest.mark.parametrize("accumulation", [3, *in_full(1)])
@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_twenty_steps_equal_the_padded_run(tmp_path, strategy, accumulation, completion_only_loss):
    options = {
        "max_steps": 20, "gradient_accumulation_steps": accumulation, "completion_only_loss": completion_only_loss,
        "learning_rate": 2e-3, "max_length": 48, "out": tmp_path,
    }  # fmt: skip
    evaluation = dataset(10, seed=5)
    padded = padded_trainer(arguments(SFTConfig, **options), eval_dataset=evaluation)
    packed = packed_trainer(arguments(packing_strategy=strategy, **options), eval_dataset=evaluation)
    padded.train(), packed.train()
    assert len(losses(padded)) == len(losses(packed)) == 20
    evaluated = [trainer.evaluate()["eval_loss"] for trainer in (packed, padded)]
    assert_trajectory([*losses(packed), evaluated[0]], [*losses(padded), evaluated[1]])
    adapters = [{n: p.detach() for n, p in t.model.named_parameters() if p.requires_grad} for t in (packed, padded)]
    assert_weights(*adapters, steps=20)
    theirs, ours = map(logs_of, (padded, packed))
    for key in ("num_tokens", "learning_rate", "epoch"):
        assert [h[key] for h in ours] == [h[key] for h in theirs]


def test_step_takes_fewer_micro_batches_within_the_budget(tmp_path):
    options = {"gradient_accumulation_steps": 6, "max_steps": 6, "include_num_input_tokens_seen": "all"}
    trainer = packed_trainer(arguments(out=tmp_path, **options))
    longest = max(map(len, trainer.train_dataset["input_ids"]))
    tight = packed_trainer(arguments(out=tmp_path, max_tokens_per_microbatch=longest, **options))
    batches = [batches_of(each) for each in (trainer, tight)]
    trainer.train(), tight.train()
    sizes, tight_sizes = ([batch["input_ids"].numel() for batch in seen] for seen in batches)
    assert max(sizes) <= 4 * longest and len(sizes) < 6 * 6, "fewer micro-batches than the padded run"
    assert max(tight_sizes) <= longest and len(tight_sizes) > len(sizes)
    assert_trajectory(losses(tight), losses(trainer))
    assert trainer.state.log_history[0]["micro_batches"] < 6
    assert tight.state.num_input_tokens_seen == logs_of(tight)[-1]["num_tokens"], "no pads"


def test_negative_control_packing_without_boundaries_is_another_training(tmp_path):
    padded = padded_trainer(arguments(SFTConfig, tmp_path, max_steps=5))
    padded.train()
    packed = packed_trainer(arguments(out=tmp_path, max_steps=5, check_packing=False))
    collate = packed.data_collator

    def forget(examples):
        batch = collate(examples)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": torch.arange(
            batch["input_ids"].shape[1])[None]}  # fmt: skip

    packed.data_collator = forget
    packed.train()
    assert_another_run(losses(packed), losses(padded))


def test_packing_patching_and_lora_are_on_by_default(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path), peft_config=None)
    assert isinstance(trainer.model, PeftModel)
    assert "level: attention" in describe(trainer.model)
    trainer.train()
    assert trainer.check_report.is_exact
    assert trainer.state.log_history[0]["documents"] == 4


def test_a_model_without_adapter_is_trained_whole_and_given_back_by_unpatch(tmp_path):
    """The head that scores trained positions only is gone, too."""
    model, args = tiny.model(layers=2), arguments(out=tmp_path, use_peft=False)
    trainer = packed_trainer(args, model=model, peft_config=None)
    assert all(p.requires_grad for p in trainer.model.parameters())
    given = vars(model)["forward"]
    assert isinstance(given, Head)
    trainer.train()
    unpatch(trainer.model)
    assert vars(model)["forward"] == given.original
    assert not any("forward" in vars(module) for module in model.modules() if module is not model)


def test_a_peft_model_is_trained_as_it_is(tmp_path):
    model = get_peft_model(tiny.model(layers=2), lora_config())
    trainer = packed_trainer(arguments(out=tmp_path), model=model, peft_config=None)
    assert trainer.model is model
    trainer.train()


def test_compute_metrics_gets_what_the_padded_run_gives(tmp_path):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"shape": prediction.predictions.shape[0]}

    given = {"eval_dataset": dataset(6, seed=5), "compute_metrics": compute_metrics}
    packed = packed_trainer(arguments(out=tmp_path), **given)
    padded = padded_trainer(arguments(SFTConfig, tmp_path), **given)
    ours, theirs = packed.evaluate(), padded.evaluate()
    assert ours["eval_shape"] == theirs["eval_shape"] == 6
    assert (seen[0].predictions == seen[1].predictions).all()
    assert (seen[0].label_ids == seen[1].label_ids).all()


def test_metrics_that_are_set_after_construction_get_rows(tmp_path):
    shapes, given = [], {"eval_dataset": dataset(6, seed=5)}
    for build, config in ((packed_trainer, PackedSFTConfig), (padded_trainer, SFTConfig)):
        trainer = build(arguments(config, tmp_path), **given)
        trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
        trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        shapes.append(trainer.evaluate()["eval_rows"])
    assert shapes == [6, 6]


@pytest.mark.versions
@pytest.mark.parametrize("strategy", ["step", *in_full("minibatch", "bfd")])
def test_resume_continues_bit_for_bit(tmp_path, strategy):
    options = {"packing_strategy": strategy, "max_length": 96, "per_device_train_batch_size": 2, "max_steps": 14}
    options |= {"gradient_accumulation_steps": 2}
    straight = packed_trainer(arguments(out=tmp_path / "a", **options))
    straight.train()
    stopped = packed_trainer(arguments(out=tmp_path / "b", save_strategy="steps", save_steps=9, **options))
    stopped.train()
    resumed = packed_trainer(arguments(out=tmp_path / "b", **options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-9"))
    assert losses(resumed)[-5:] == losses(straight)[-5:]
    models = (resumed.model, straight.model)
    for (name, ours), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs), name
