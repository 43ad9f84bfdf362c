"""TRL's own config asks for no packing: what cannot be packed then trains as TRL trains it, bit for bit."""

import logging
from contextlib import contextmanager

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from swap import moved, snapshot, tokenizer
from training import FORMATS, arguments, dataset, lora_config, losses
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import trl_packfa.trainers.sft.trainer
from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.errors import ContaminationError, InvalidDataset, PackingError, UnsupportedModel

TOKENIZED = Dataset.from_list(FORMATS["pre-tokenized"])


def words_collator(rows):
    """Makes tokens of text as batches are made."""
    encoded = tokenizer()([row["question"] for row in rows], return_tensors="pt", padding=True)
    return {**encoded, "labels": encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)}


def cpmant():
    from transformers import CpmAntConfig, CpmAntForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "dim_head": 4, "dim_ff": 8, "num_hidden_layers": 1}
    return CpmAntForCausalLM(CpmAntConfig(vocab_size=tiny.VOCAB, **sizes))


QUESTIONS = Dataset.from_list([{"question": tiny.words(n, seed=n)} for n in range(2, 26)])
AS_IT_IS = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
# id -> what the trainer is given, and what the one line says.
CASES = {
    "prompt tuning": (lambda: {"peft_config": PromptTuningConfig(**VIRTUAL)}, "PromptTuningConfig cannot be packed"),
    "a PeftModel": (lambda: {"model": get_peft_model(tiny.model(layers=2), PromptTuningConfig(**VIRTUAL))},
                    "PromptTuningConfig cannot be packed"),
    "a padding collator": (lambda: {"data_collator": DataCollatorForLanguageModeling(0), "train_dataset": TOKENIZED},
                           "DataCollatorForLanguageModeling does not carry document boundaries"),
    "a collator of raw rows": (lambda: {"data_collator": words_collator, "train_dataset": QUESTIONS, "args": AS_IT_IS},
                               "function does not carry document boundaries"),
    "a transform": (lambda: {"train_dataset": TOKENIZED.with_transform(lambda rows: rows), "args": AS_IT_IS},
                    "transformed on the fly"),
    "cut at the start": (lambda: {"args": {"truncation_mode": "keep_end", "max_length": 20}}, "keep_end"),
    "dispatched batches": (lambda: {"args": {"accelerator_config": {"dispatch_batches": True}}}, "dispatch_batches"),
    "a type that cannot be packed": (lambda: {"model": cpmant(), "train_dataset": TOKENIZED, "args": {"bf16": False}},
                                     "no patch for model type 'cpmant'"),
}  # fmt: skip


def trained(cls, out, case, *, config=SFTConfig, **more):
    given = {**case(), **more}
    args = arguments(config, out, **{"learning_rate": 1e-3, "bf16": True, **given.pop("args", {})})
    torch.manual_seed(7)
    options = {"train_dataset": dataset(24), "processing_class": tokenizer(), **given}
    model = options.pop("model", None) or tiny.model(layers=2)
    trainer = cls(model, args, **options)
    before = snapshot(trainer)
    trainer.train()
    return trainer, before


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_packed_trains_as_trl_trains_it_and_one_line_says_why(tmp_path, caplog, name):
    case, line = CASES[name]
    (theirs, started), (ours, before) = (trained(cls, tmp_path, case) for cls in (SFTTrainer, PackedSFTTrainer))
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "trl-packfa" in r.getMessage()]
    assert len(told) == 1 and line in told[0] and "\n" not in told[0]
    assert losses(ours) == losses(theirs) and len(losses(ours)) == 3
    assert before.keys() == started.keys() and moved(ours, before) == moved(theirs, started)
    for (parameter, p), (_, q) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.equal(p, q), parameter
    for name in ("entropy", "mean_token_accuracy", "num_tokens", "grad_norm"):
        logged = [[entry.get(name) for entry in trainer.state.log_history] for trainer in (ours, theirs)]
        assert logged[0] == logged[1], name


FREE = {"padding_free": True, "max_length": None}
ASKED = [(PackedSFTConfig, {}), (SFTConfig, {"packing": True}), (SFTConfig, FREE)]


@pytest.mark.parametrize(("config", "asked"), ASKED, ids=["PackedSFTConfig", "packing", "padding_free"])
@pytest.mark.parametrize("name", ["prompt tuning", "a transform"])
def test_who_asks_for_packing_is_refused(tmp_path, name, config, asked):
    case = CASES[name][0]()
    case["args"] = {**case.get("args", {}), **asked}
    with pytest.raises(PackingError):
        trained(PackedSFTTrainer, tmp_path, lambda: case, config=config)


def test_padding_free_with_a_length_that_trl_does_not_enforce_is_refused_as_by_trl(tmp_path):
    """A config of ours cuts documents to that length."""
    options = {"padding_free": True, "max_length": 64}
    for cls, message in ((SFTTrainer, "`max_length` is not enforced"), (PackedSFTTrainer, "max_length=64")):
        with pytest.raises(ValueError, match=message):
            trained(cls, tmp_path, lambda: {"args": options})
    trainer, _ = trained(PackedSFTTrainer, tmp_path, lambda: {"args": options}, config=PackedSFTConfig)
    assert trainer.args.strategy.recuts_steps


@contextmanager
def refusing(model, **_):
    raise ContaminationError("this model is refused.", why=["it was tried"])
    yield


@pytest.mark.parametrize("adapter", [None, lora_config], ids=["full", "lora"])
def test_model_whose_patch_is_refused_trains_padded_and_trls_trainer_is_built_once(
    tmp_path, monkeypatch, caplog, adapter
):
    built, build = [], SFTTrainer.__init__
    monkeypatch.setattr(SFTTrainer, "__init__", lambda self, *a, **k: built.append(self) or build(self, *a, **k))
    monkeypatch.setattr(trl_packfa.trainers.settling, "patched", refusing)
    options = {} if adapter is None else {"peft_config": adapter()}
    theirs, ours = (trained(cls, tmp_path, dict, **options)[0] for cls in (SFTTrainer, PackedSFTTrainer))
    assert built == [theirs, ours]
    assert "this model is refused (it was tried). Training as SFTTrainer would" in caplog.text
    left, right = (
        {n: p for n, p in trainer.model.named_parameters() if p.requires_grad} for trainer in (theirs, ours)
    )
    assert left.keys() == right.keys() and all(torch.equal(p, right[name]) for name, p in left.items())
    assert losses(theirs) == losses(ours)


def test_patch_that_fails_on_the_built_model_is_the_error_with_every_config(tmp_path, monkeypatch):
    def refuse(model, **_):
        raise UnsupportedModel("this model is refused.")

    monkeypatch.setattr(trl_packfa.trainers.sft.trainer, "patch", refuse)
    for config in (SFTConfig, PackedSFTConfig):
        with pytest.raises(UnsupportedModel, match=r"this model is refused\."):
            trained(PackedSFTTrainer, tmp_path, dict, config=config)


@pytest.mark.parametrize("config", [SFTConfig, TrainingArguments])
def test_what_can_be_packed_still_is(tmp_path, config, caplog):
    trainer, _ = trained(PackedSFTTrainer, tmp_path, dict, config=config)
    assert trainer.args.strategy.recuts_steps and trainer.check_report.is_exact
    assert "Training as SFTTrainer" not in caplog.text


def test_a_stream_whose_documents_nothing_bounds_is_packed_by_micro_batch(tmp_path, caplog):
    stream = dataset(24).to_iterable_dataset()
    trainer, _ = trained(PackedSFTTrainer, tmp_path, lambda: {"train_dataset": stream, "args": {"max_length": None}})
    assert trainer.args.packing_strategy == "minibatch" and "Training as SFTTrainer" not in caplog.text


def test_what_trl_cannot_train_is_refused_with_our_words(tmp_path):
    for given, message in [
        ({"train_dataset": Dataset.from_list([])}, "is empty"),
        ({"train_dataset": Dataset.from_list([{"a": 1}])}, "no TRL format"),
        ({"peft_config": LoraConfig(target_modules=["lm_head"])}, "targets 'lm_head'"),
        ({"model": str(tmp_path / "nowhere")}, "nowhere"),
    ]:
        with pytest.raises(PackingError, match=message):
            trained(PackedSFTTrainer, tmp_path, lambda given=given: given)
    untrained = Dataset.from_list([{"input_ids": [5, 6], "labels": [-100, -100]}])
    with pytest.raises(InvalidDataset, match="no document has a token to train on"):
        trained(PackedSFTTrainer, tmp_path, lambda: {"train_dataset": untrained})
