"""The trainer: the padded run's losses, everything counted, everything resumed; rows, plans and losses of data."""

import json
import logging
from itertools import chain
from types import SimpleNamespace

import pytest
import tiny
import torch
from peft import PeftModel, get_peft_model
from selection import in_full
from tolerance import assert_trajectory, assert_weights
from training import (
    arguments,
    batches_of,
    dataset,
    logs_of,
    lora_config,
    losses,
    packed_trainer,
    padded_trainer,
    trained,
)
from trl import SFTConfig

from trl_packfa import DataCollatorForPacking, PackedSFTConfig, describe, unpatch
from trl_packfa.kernels.lm_head.chunked import Head
from trl_packfa.parallel import ranks


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


@pytest.mark.parametrize("strategy", ["step", *in_full("minibatch", "bfd")])
def test_padding_is_counted_nowhere(tmp_path, strategy):
    """With and without `pad_to_multiple_of`: the same loss, tokens, documents, entropy, accuracy and fill."""
    logs = []
    for multiple in (None, 64):
        options = {"packing_strategy": strategy, "max_length": 96, "gradient_accumulation_steps": 2, "max_steps": 3}
        trainer = trained(packed_trainer(arguments(out=tmp_path, pad_to_multiple_of=multiple, **options)))
        logs.append(logs_of(trainer))
    for plain, padded in zip(*logs, strict=True):
        assert plain["tokens_per_second"] > 0 and padded["tokens_per_second"] > 0
        exact = [name for name in plain if name in ("num_tokens", "documents", "longest_document", "fill")]
        assert [plain[name] for name in exact] == [padded[name] for name in exact]
        near = ["loss", "entropy", "mean_token_accuracy"]
        assert_trajectory([[padded[name] for name in near]], [[plain[name] for name in near]])


def test_the_plan_of_an_epoch_is_what_happens(tmp_path):
    """Micro-batches, balance and padding, told before the first step; `tests/plan` counts steps and rows."""
    options = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1, "check_packing": False}
    trainer = packed_trainer(arguments(out=tmp_path, max_length=96, **options))
    plan, logs = trainer.packing_plan, logs_of(trained(trainer))
    logged = sum(entry["micro_batches"] for entry in logs) / len(logs)
    assert plan["micro_batches_per_step"] == pytest.approx(logged, abs=0.7)
    assert plan["imbalance"] == plan["imbalance_padded"] == 1.0, "one process"
    assert 0 < plan["padding_without_packing"] < 1
    trainer.save_reports(tmp_path)
    assert json.loads((tmp_path / "packing_report.json").read_text())["plan"] == plan


def test_wrapped_cuts_where_rows_are_full_and_honours_every_boundary(tmp_path):
    """Each row holds `max_length` tokens; what is cut off is a document of its own, which sees nothing before it."""
    args = arguments(
        out=tmp_path, packing_strategy="wrapped", max_length=64, per_device_train_batch_size=1, max_steps=4,
        completion_only_loss=False,
    )  # fmt: skip
    trainer = packed_trainer(args)
    report = trainer.packing_reports["train"]
    assert report.split > 0 and report.packed_tokens == report.tokens
    batches = batches_of(trainer)
    trainer.train()
    assert trainer.check_report.is_exact
    layouts = [batch["packed_layout"] for batch in batches]
    assert sorted(layout.num_tokens for layout in layouts)[1:] == [64] * 3
    assert all(layout.num_documents > 1 for layout in layouts)


def test_bfd_fills_rows_and_repacks_every_epoch(tmp_path):
    options = {"packing_strategy": "bfd", "max_length": 96, "per_device_train_batch_size": 1, "check_packing": False}
    trainer = packed_trainer(arguments(out=tmp_path, max_steps=-1, num_train_epochs=2, **options))
    batches = batches_of(trainer)
    trainer.train()
    rows = [[ids.tolist() for ids in batch["packed_layout"].split(batch["input_ids"])] for batch in batches]
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert sorted(chain(*first)) == sorted(chain(*second)) == sorted(trainer.train_dataset["input_ids"])
    assert [*map(sorted, first)] != [*map(sorted, second)]
    assert max(sum(map(len, row)) for row in rows) <= 96 and trainer.packing_sampler.fill > 0.9
    assert all(0 < entry["fill"] <= 1 for entry in trainer.state.log_history if "fill" in entry)


def test_what_is_lost_is_counted_reported_and_saved(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trl_packfa"):
        args = arguments(out=tmp_path, max_length=20, save_strategy="steps", save_steps=3)
        trainer = packed_trainer(args)
    report = trainer.packing_reports["train"]
    assert report.documents == 48 and report.truncated > 0 and report.tokens_lost > 0
    assert report.dropped_untrained > 0, "prompts alone longer than max_length"
    assert f"truncated {report.truncated}" in caplog.text and "tokens lost" in caplog.text
    assert len(trainer.train_dataset) == report.packed_documents == 48 - report.dropped_untrained
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-3" / "packing_report.json").read_text())
    assert saved["train"] == report.to_dict()
    assert json.loads((tmp_path / "checkpoint-3" / "check_report.json").read_text())["verdict"] == "exact"


def test_split_trains_every_token(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path, max_length=20, overflow="split", completion_only_loss=False))
    report = trainer.packing_reports["train"]
    single_tokens = report.dropped_untrained  # a piece of one token predicts nothing
    assert report.split > 0 and report.tokens_lost == single_tokens
    assert max(len(ids) for ids in trainer.train_dataset["input_ids"]) == 20
    assert "source" in trainer.train_dataset.column_names, "user columns survive"


@pytest.mark.parametrize("strategy", ["step", "minibatch"])
def test_losses_of_a_stream_are_summed_over_the_steps_of_a_log(tmp_path, strategy):
    whole = packed_trainer(arguments(out=tmp_path, max_length=None)).train_dataset["input_ids"]
    lengths = [len(ids) for ids in whole]  # the stream is cut as a whole, and counted with its first document
    expected = {"truncated": sum(n > 20 for n in lengths), "tokens_lost": sum(max(n - 20, 0) for n in lengths)}
    for every in (1, 4):
        args = arguments(
            out=tmp_path, max_length=20, max_steps=4, logging_steps=every, packing_strategy=strategy,
            completion_only_loss=False,
        )  # fmt: skip
        logs = trained(packed_trainer(args, train_dataset=dataset().to_iterable_dataset())).state.log_history
        assert {name: sum(entry.get(name, 0) for entry in logs) for name in expected} == expected


@pytest.mark.parametrize("strategy", ["step", "minibatch"])
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_tokens_seen_are_those_of_the_padded_run_whatever_the_pad(tmp_path, strategy, pad_is_eos):
    def seen(trainer):
        trainer.train()
        return trainer.state.num_input_tokens_seen

    tokenizer = tiny.tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"out": tmp_path, "include_num_input_tokens_seen": "non_padding", "max_steps": 2}
    padded = packed_trainer(arguments(**options, packing=False), processing_class=tokenizer)
    options |= {"packing_strategy": strategy, "pad_to_multiple_of": 8}
    packed = packed_trainer(arguments(**options), processing_class=tokenizer)
    assert seen(padded) == seen(packed) > 0


def test_ranks_add_up_their_tokens_once_a_log_not_once_a_micro_batch(tmp_path, monkeypatch):
    trainer = packed_trainer(arguments(out=tmp_path, pad_to_multiple_of=8))
    batch = DataCollatorForPacking(pad_to_multiple_of=8)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    gathered = []
    monkeypatch.setattr(ranks, "gather_object", lambda mine: gathered.append(mine) or [*mine, *mine])
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(num_processes=2))
    trainer._metrics["train"]["num_tokens"] = [148]
    for _ in range(3):
        trainer._count_tokens(batch, before=100)
    trainer._count_tokens({}, before=100)  # run only to take part in collectives
    assert gathered == [] and batch["packed_layout"].padding == 3
    trainer._settle_tokens()
    assert len(gathered) == 1 and trainer._total_train_tokens == 100 + 2 * 3 * 5
    assert trainer._metrics["train"]["num_tokens"] == [130]
    trainer._settle_tokens()
    assert trainer._total_train_tokens == 130, "nothing is added twice"
