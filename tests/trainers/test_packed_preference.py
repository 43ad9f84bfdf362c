"""`PackedDPOTrainer`, `PackedRewardTrainer`, `PackedKTOTrainer`: TRL's losses and means over pairs, without pads, of
steps that are cut otherwise."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
import trl
from datasets import Dataset
from selection import in_full
from tiny_models import small_model
from tolerance import CONTROL
from training import arguments
from trl_trainers import (
    OF_MICRO_BATCHES,
    PACKED,
    beyond,
    build,
    build_packed,
    pairs,
    run,
    tokenizer,
    train,
)

import trl_packfa
from trl_packfa import PackedDPOConfig, PackedDPOTrainer, PackedKTOConfig, PackedRewardConfig
from trl_packfa.cli.main import main
from trl_packfa.errors import ContaminationError, InvalidConfig, InvalidDataset, InvalidLayout, UnsupportedModel
from trl_packfa.scripts.parsing import trainer_name
from trl_packfa.scripts.train import kind_of
from trl_packfa.trainers.preference import cutting
from trl_packfa.trainers.preference.cutting import PairPlan

# Four padded micro-batches a step, for fewer to be made of.
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def later(*cases):
    """Cases of two arguments, as `in_full` of one."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def both(kind, out, **options):
    expected, _ = run(build, kind, out, **options)
    return expected, *run(build_packed, kind, out, **options)


@pytest.mark.versions
@pytest.mark.parametrize("lora", [True, *in_full(False)], ids=["lora", "full"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_recut_step_is_the_padded_one(kind, lora, tmp_path):
    options = {"lora": lora, "max_steps": 4, **ACCUMULATED}
    expected, logs, trainer = both(kind, tmp_path, **options)
    besides = () if kind == "kto" else OF_MICRO_BATCHES[kind]
    assert not beyond(expected, logs, besides=besides)
    assert logs[0].keys() >= set(besides)
    assert all(entry["padding_saved"] > 0.1 for entry in logs)
    if kind == "kto":  # the KL is estimated over each padded micro-batch
        assert "estimates the KL" in trainer.cut_reason and "micro_batches" not in logs[0]
    else:
        assert trainer.cut_reason == "" and all(entry["micro_batches"] < 4 for entry in logs)


@pytest.mark.parametrize("kind, options", [
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("reward", {"center_rewards_coefficient": 0.01}),
    ("reward", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}),  # maybe one pair alone
    ("dpo", {"precompute_ref_log_probs": True}),
    ("dpo", {"bf16": True}),
    ("dpo", {"loss_type": ["ipo", "sigmoid_norm"], "loss_weights": [0.5, 1.0], "use_weighting": True}),
    ("dpo", {"ld_alpha": 0.5, "f_divergence_type": "js_divergence", "gradient_checkpointing": True}),
    # 24 pairs: the epoch's last step has fewer micro-batches, and the last of them fewer pairs
    ("dpo", {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3, "max_steps": 4}),
    *later(
        ("reward", {"bf16": True}),
        ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
        ("dpo", {"loss_type": ["hinge", "exo_pair", "nca_pair", "robust"], "label_smoothing": 0.1}),
        ("dpo", {"loss_type": ["bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"]}),
        ("kto", {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}),
    ),
])  # fmt: skip
def test_with_what_they_can_do(kind, options, tmp_path):
    options = {"max_steps": 3, **ACCUMULATED, **options}
    expected, logs, trainer = both(kind, tmp_path, **options)
    coarse = {"only": ("loss",), "dtype": torch.bfloat16} if "bf16" in options else {}
    assert not beyond(expected, logs, **(coarse or {"besides": OF_MICRO_BATCHES[kind]}))
    assert trainer.cut_reason == "" and sum(entry["micro_batches"] for entry in logs) < 3 * len(logs) + 1


@pytest.mark.parametrize("loss, why", [("aot", "sorts the log-ratios"), ("sft", "is a mean over the tokens")])
def test_losses_of_a_whole_micro_batch_are_not_cut(loss, why, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = {"max_steps": 2, "loss_type": [loss, "sigmoid"], **ACCUMULATED}
    expected, logs, trainer = both("dpo", tmp_path, **options)
    assert not beyond(expected, logs) and why in trainer.cut_reason
    told = [r.message for r in caplog.records if "padded micro-batches stay as they are: loss_type" in r.message]
    assert len(told) == 1


def test_negative_control_such_a_loss_cut_all_the_same_is_refused(tmp_path, monkeypatch):
    """The loss of the first micro-batch is held against those of its longer and its shorter pairs."""
    monkeypatch.setattr(PackedDPOTrainer, "_why_not_cut", lambda self: "")
    # Of a sum over pairs a mean of other means is another number.
    trainer = build_packed("dpo", tmp_path, max_steps=1, loss_type=["sft"], **ACCUMULATED)
    with pytest.raises(ContaminationError, match=r"PackedDPOTrainer: the loss of the first micro-batch, .* instead"):
        trainer.train()


def test_negative_control_unweighted_parts_train_something_else(tmp_path, monkeypatch):
    options = {"max_steps": 3, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    expected, _ = run(build, "reward", tmp_path, **options)
    weight = cutting.PairWeight
    monkeypatch.setattr(cutting, "PairWeight", lambda widths, _: weight(widths, 1.0))
    logs, _ = run(build_packed, "reward", tmp_path, **options)
    assert beyond(expected, logs, times=CONTROL)


def test_an_own_collator_or_loss_is_not_cut(tmp_path):
    collator = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    data = {"train_dataset": Dataset.from_list(pairs(8)), "processing_class": tokenizer()}
    args = arguments(PackedDPOConfig, tmp_path, use_peft=False)
    models = {"model": tiny.model(layers=1), "ref_model": tiny.model(layers=1)}
    assert "data_collator makes" in PackedDPOTrainer(args=args, data_collator=collator, **models, **data).cut_reason

    class Own(PackedDPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert "compute_loss of Own is not TRL's" in build_packed("dpo", tmp_path, cls=Own).cut_reason


def looking(cls):
    """Return a subclass whose training steps look into their batches."""

    class Own(cls):
        looked = 0

        def training_step(self, model, inputs, *args, **kwargs):
            self.looked += inputs["completion_mask"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

    return Own


def test_an_own_step_or_a_late_change_gets_the_padded_runs_micro_batches(tmp_path):
    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    expected, stock = run(build, "dpo", tmp_path, cls=looking(trl.DPOTrainer), **options)
    logs, ours = run(build_packed, "dpo", tmp_path, cls=looking(PackedDPOTrainer), **options)
    assert not beyond(expected, logs) and ours.looked == stock.looked > 0
    assert "training_step of Own is not TRL's" in ours.cut_reason

    def late(make):
        trainer = make("dpo", tmp_path, **options)
        trainer.loss_types = ["aot"]
        return train(trainer), trainer

    (expected, _), (logs, ours) = late(build), late(build_packed)
    assert not beyond(expected, logs) and "sorts the log-ratios" in ours.cut_reason


@pytest.mark.parametrize("kind", PACKED)
def test_evaluation_and_overflow_are_trls(kind, tmp_path):
    """The same pairs are cut, dropped and evaluated, and the losses counted."""
    options = {"max_steps": 2, "max_length": 30, **ACCUMULATED}
    expected, padded = run(build, kind, tmp_path, **options)
    logs, trainer = run(build_packed, kind, tmp_path, **options)
    assert not beyond(expected, logs, besides=() if kind == "kto" else OF_MICRO_BATCHES[kind])
    assert not beyond([padded.evaluate()], [trainer.evaluate()])
    report = trainer.packing_reports["train"]
    rows = 1 if kind == "kto" else 2
    assert report.documents == 24 * rows and report.tokens_lost == report.tokens - report.packed_tokens > 0
    assert report.packed_documents == len(padded.train_dataset) * rows == len(trainer.train_dataset) * rows
    assert report.dropped_too_long if kind == "reward" else report.truncated


def test_pairs_over_max_length_are_dropped_or_refused_as_asked(tmp_path):
    dropping = build_packed("dpo", tmp_path, max_length=30, overflow="drop")
    report = dropping.packing_reports["train"]
    assert report.truncated == 0 < report.dropped_too_long and report.too_long
    with pytest.raises(InvalidDataset, match=r"train example \d+ has a row of \d+ tokens, max_length is 30"):
        build_packed("kto", tmp_path, max_length=30, overflow="error")
    with pytest.raises(InvalidDataset, match="no train example fits: 24 examples, max_length=2"):
        build_packed("reward", tmp_path, max_length=2)


def test_a_token_budget(tmp_path):
    trainer = build_packed("dpo", tmp_path, max_steps=2, max_tokens_per_microbatch=200, **ACCUMULATED)
    expected, _ = run(build, "dpo", tmp_path, max_steps=2, **ACCUMULATED)
    torch.manual_seed(0)
    logs = train(trainer)
    assert not beyond(expected, logs, besides=OF_MICRO_BATCHES["dpo"])
    assert logs[0]["micro_batches"] >= logs[0]["num_tokens"] / 200
    with pytest.raises(InvalidConfig, match=r"=40 is smaller than example \d+, whose rows have \d+ tokens"):
        build_packed("reward", tmp_path, max_tokens_per_microbatch=40)
    with pytest.raises(InvalidConfig, match=r"max_tokens_per_microbatch=999 has no effect: padded micro-batches stay"):
        build_packed("kto", tmp_path, max_tokens_per_microbatch=999)
    with pytest.raises(InvalidConfig, match="has no effect under packing_strategy='minibatch'"):
        build_packed("dpo", tmp_path, max_tokens_per_microbatch=999, packing_strategy="minibatch")


def test_bad_input_is_refused_before_anything_is_loaded(tmp_path):
    small = {"use_cpu": True, "bf16": False}
    with_liger = "PackedKTOConfig with use_liger_kernel=True cannot run without its pads"
    for config, options, message in (
        (PackedKTOConfig, {"use_liger_kernel": True}, with_liger),
        (PackedDPOConfig, {"packing_strategy": "bfd"}, "packing_strategy='bfd' is not supported by PackedDPOConfig"),
        (PackedDPOConfig, {"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        (PackedDPOConfig, {"truncation_mode": "keep_end"}, "truncation_mode='keep_end' with packing"),
        (PackedDPOConfig, {"load_in_4bit": True, "use_peft": False}, "use_peft=False with a quantized model"),
        (PackedRewardConfig, {"load_in_4bit": True}, "a quantized reward model without bf16=True"),
        (PackedDPOConfig, {"overflow": "split"}, "overflow='split' is not supported by PackedDPOConfig"),
        (PackedRewardConfig, {"overflow": "truncate"}, "overflow='truncate' is not supported by PackedRewardConfig"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            config(str(tmp_path), **options, **small)
    data = Dataset.from_list(pairs(4))
    with pytest.raises(InvalidConfig, match="overflow='error' with a stream"):
        PackedDPOTrainer("no such model", args=PackedDPOConfig(str(tmp_path), overflow="error", **small),
                         train_dataset=data.to_iterable_dataset())  # fmt: skip
    with pytest.raises(InvalidDataset, match=r"train_dataset must be(.|\n)*not list(.|\n)*Dataset\.from_list\(rows\)"):
        PackedDPOTrainer("no such model", args=PackedDPOConfig(str(tmp_path), **small), train_dataset=pairs(4))
    with pytest.raises(InvalidDataset, match=r"(?s)has a column 'image', and PackedRewardTrainer takes no images"):
        trl_packfa.PackedRewardTrainer("no such model", args=PackedRewardConfig(str(tmp_path), **small),
                                       train_dataset=data.add_column("image", [0] * 4))  # fmt: skip
    with pytest.raises(InvalidConfig, match="PackedDPOTrainer packs its batches already"):
        trl_packfa.padding_free(build_packed("dpo", tmp_path))


def test_masks_with_holes_and_models_that_are_not_patched(tmp_path):
    trainer = build_packed("dpo", tmp_path, max_steps=1)
    collate = trainer.data_collator.collator

    def holes(examples):
        batch = collate(examples)
        batch["attention_mask"][0, 1] = 0
        return batch

    trainer.data_collator.collator = holes
    with pytest.raises(InvalidLayout, match="the attention_mask has a hole: row 0"):
        trainer.train()
    trainer = build_packed("dpo", tmp_path)
    trl_packfa.unpatch(trainer.ref_model)
    with pytest.raises(UnsupportedModel, match=r"PackedDPOTrainer\.ref_model is no longer patched"):
        trainer.train()


def test_padding_free_in_dpos_config_is_what_it_says(tmp_path, caplog):
    args = arguments(trl.DPOConfig, tmp_path, padding_free=True, max_steps=1)
    trainer = PackedDPOTrainer(tiny.model(layers=1), args=args, train_dataset=Dataset.from_list(pairs(8)),
                               processing_class=tokenizer())  # fmt: skip
    assert isinstance(trainer.args, PackedDPOConfig) and not trainer.args.padding_free
    told = [record.message for record in caplog.records if "padding_free=True" in record.message]
    assert len(told) == 1 and "TRL 1.16.0's own trainer would warn and pad" in told[0]
    trainer.train()


@pytest.mark.parametrize("kind", PACKED)
def test_an_adapter_unless_told_otherwise(kind, tmp_path):
    """As in `PackedSFTConfig`; a classifier's new head is trained whole."""
    adapted = build_packed(kind, tmp_path, use_peft=True).model
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in trained)
    assert any("score" in name and "lora" not in name for name in trained) == (kind == "reward")


@pytest.mark.parametrize("looks_for_size", [False, True])
def test_pairs_are_dealt_level_and_whole(looks_for_size):
    """Two ranks: every pair once, nothing above the budget; with pads where the run looks for the size that fits."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, (24, 2))
    rows = [{"a": [0] * int(a), "b": [0] * int(b)} for a, b in lengths]
    columns = (("a",), ("b",))
    options = {"max_tokens_per_microbatch": None, "per_device_train_batch_size": 4, "pad_to_multiple_of": None,
               "data_parallel_rank": 0, "data_parallel_size": 2, "auto_find_batch_size": looks_for_size}  # fmt: skip
    trainer = SimpleNamespace(args=SimpleNamespace(**options), train_dataset=Dataset.from_list(rows),
                              model=tiny.model(layers=1))  # fmt: skip
    cutter = PairPlan(trainer, rows=columns)
    assert cutter.budget == 4 * 2 * lengths.max()
    groups = np.repeat([0, 2, 4, 1, 3, 5], [4, 4, 4, 4, 4, 4])
    dealt = cutter._deal(lengths, groups)
    assert sorted(i for parts in dealt for part in parts for i in part) == list(range(24))
    assert len(dealt[0]) == len(dealt[1]) <= 3 and (looks_for_size or len(dealt[0]) < 3)
    padded = [lengths[part].size * lengths[part].max() for parts in dealt for part in parts]
    assert (max(padded) <= cutter.budget) == looks_for_size, "otherwise pads count as an eighth"
    assert all(cutter._footprint(lengths[part]) <= cutter.budget for parts in dealt for part in parts)
    costs = [[lengths[part].sum() for part in parts] for parts in dealt]
    assert max(map(sum, costs)) <= 1.1 * min(map(sum, costs))


def test_the_command_line_reads_the_arguments_of_the_trainer_that_is_named():
    """`--trainer`, or `trainer:` in the YAML file."""
    assert trainer_name(["--trainer=dpo"]) == "dpo" and trainer_name(["--trainer", "reward"]) == "reward"
    assert trainer_name([]) == trainer_name(["--trainer", "ppo"]) == "sft"
    assert kind_of([]).trainer is trl_packfa.PackedSFTTrainer
    with pytest.raises(SystemExit):
        main(["train", "--trainer", "ppo"])


@pytest.mark.parametrize("kind", in_full(*PACKED))
def test_a_four_bit_base_trains(kind, tmp_path):
    """As in `PackedSFTConfig`, by the same arguments."""
    pytest.importorskip("bitsandbytes")
    model = tiny.save(tmp_path / "model", small_model("llama", num_hidden_layers=1, intermediate_size=128))
    trainer = build_packed(kind, tmp_path / "out", model=model, lora=False, use_peft=True,
                           load_in_4bit=True, bf16=True, max_steps=2, reference=False, **ACCUMULATED)  # fmt: skip
    assert trainer.model.is_loaded_in_4bit
    assert all(np.isfinite(entry["loss"]) and entry["padding_saved"] > 0 for entry in train(trainer))
