"""What TRL's test suite asserts of a model, its adapters, templates, losses and evaluation, of ours too."""

import pytest
import tiny
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import LoraConfig
from selection import exhaustive
from snippets import shorten_training
from swap import SWAP, both, build, moved, snapshot, tokenizer, train_both
from tolerance import assert_trajectory
from training import FORMATS, dataset, losses, trained
from transformers import TrainerCallback

from trl_packfa import PackedSFTTrainer
from trl_packfa.errors import PackingError


def test_model_init_kwargs_choose_the_dtype(tmp_path):
    tiny.model(layers=2).save_pretrained(tmp_path / "model")
    args = {"model_init_kwargs": {"dtype": torch.bfloat16}, "learning_rate": 0.1}
    for cls in SWAP:
        trainer = build(cls, tmp_path, model=str(tmp_path / "model"), args=args)
        before = snapshot(trainer)
        trainer.train()
        assert all(p.dtype == torch.bfloat16 for p in trainer.model.parameters())
        assert len(moved(trainer, before)) > 10


def test_arguments_may_be_left_out(tmp_path, monkeypatch):
    shorten_training(monkeypatch)  # bf16, the default, needs use_cpu where there is no GPU
    monkeypatch.chdir(tmp_path)
    tiny.model(layers=2).save_pretrained("model")
    tokenizer().save_pretrained("model")
    for cls in SWAP:
        trainer = cls("model", train_dataset=dataset(4))
        assert trainer.args.output_dir == "model-SFT"
        assert {"sft", "trl"} <= set(trainer.model.model_tags)


def test_an_adapters_weights_are_seeded_and_alone_are_trained(tmp_path):
    adapters = []
    for cls in SWAP:
        torch.manual_seed(len(adapters))  # another state of the generator
        model = tiny.model(layers=2)
        trainer = build(cls, tmp_path, model=model, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        before = snapshot(trainer)
        trainer.train()
        assert moved(trainer, before) and all("lora_" in name for name in moved(trainer, before))
        adapters.append({name: p for name, p in before.items() if "lora_A" in name})
    assert adapters[0] and all(torch.equal(p, adapters[1][name]) for name, p in adapters[0].items())


@pytest.mark.parametrize(("adapter", "reentrant"), [(True, True), (False, False),
                                                    *exhaustive((True, False), (False, True))])  # fmt: skip
def test_gradient_checkpointing_trains_as_in_sft_trainer(tmp_path, adapter, reentrant):
    options = {"peft_config": LoraConfig(r=4)} if adapter else {}
    args = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    theirs, ours = train_both(tmp_path, args=args, **options)
    assert_trajectory(losses(ours), losses(theirs))


def test_an_auxiliary_loss_without_experts_is_refused(tmp_path):
    for cls in SWAP:
        with pytest.raises(ValueError, match="not a Mixture-of-Experts model"):
            build(cls, tmp_path, args={"router_aux_loss_coef": 0.5})


def test_a_chat_template_from_a_file_is_used_and_saved(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] + ' </s> ' }}{% endfor %}")
    args = {"chat_template_path": str(template), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for number, cls in enumerate(SWAP):
        trained(build(cls, tmp_path / str(number), Dataset.from_list(FORMATS["messages"]), args=args))
        saved = tmp_path / str(number) / "checkpoint-2" / "chat_template.jinja"
        assert saved.read_text() == template.read_text()


def test_a_chat_template_from_another_tokenizer_brings_its_tokens(tmp_path):
    tokenizer().save_pretrained(tmp_path / "other")
    bare = tiny.tokenizer()
    bare.chat_template = None
    data = Dataset.from_list(FORMATS["messages"])
    options = {"args": {"chat_template_path": str(tmp_path / "other")}, "processing_class": bare}
    assert_trajectory(*map(losses, train_both(tmp_path, data, **options)))


def test_special_tokens_are_the_ones_named(tmp_path):
    prepared = []
    for trainer in both(tmp_path, args={"eos_token": "<s>", "pad_token": "<unk>"}):
        assert trainer.processing_class.eos_token == "<s>" and trainer.model.config.eos_token_id == 1
        assert trainer.processing_class.pad_token == "<unk>" and trainer.model.config.pad_token_id == 3
        prepared.append(trainer.train_dataset[:]["input_ids"])
    assert prepared[0] == prepared[1]
    for name in ("eos_token", "pad_token"):
        for cls in SWAP:
            with pytest.raises(ValueError, match=f"`{name}` .*not found in the vocabulary"):
                build(cls, tmp_path, args={name: "<nowhere>"})


@pytest.mark.parametrize("args", [
    {"loss_type": "dft", "max_grad_norm": 0.1}, {"label_smoothing_factor": 0.1, "warmup_steps": 2}
], ids=" ".join)  # fmt: skip
def test_training_arguments_mean_the_same(tmp_path, args):
    theirs, ours = train_both(tmp_path, args=args)
    assert_trajectory(losses(ours), losses(theirs))


def test_a_model_with_noisy_embeddings_is_found_exact_and_trains(tmp_path):
    """The noise itself is compared by `tests/trainers/test_losses.py`."""
    trainer = trained(build(PackedSFTTrainer, tmp_path, args={"neftune_noise_alpha": 5.0}))
    assert trainer.check_report.is_exact and len(losses(trainer)) == 3


@pytest.mark.parametrize(("kind", "streaming"), [
    ("one", True), ("dict", False), ("DatasetDict", True),
    *exhaustive(("one", False), ("dict", True), ("DatasetDict", False)),
])  # fmt: skip
def test_evaluation_takes_every_kind_of_dataset(tmp_path, kind, streaming):
    split = dataset(6, seed=5)
    split = split.to_iterable_dataset() if streaming else split
    split_dict = {"a": split, "b": split}
    kinds = {"one": split, "dict": split_dict}
    kinds["DatasetDict"] = (IterableDatasetDict if streaming else DatasetDict)(split_dict)
    given = []
    for trainer in both(tmp_path, eval_dataset=kinds[kind]):
        given.append(trainer.evaluate())
        again = trainer.evaluate(eval_dataset=kinds[kind])
        losses_of = {name for name in again if name.endswith("_loss")}
        assert losses_of == ({"eval_loss"} if kind == "one" else {"eval_a_loss", "eval_b_loss"})
        assert all(again[name] == given[-1][name] for name in losses_of)
    assert_trajectory(*([metrics[name] for name in sorted(losses_of)] for metrics in given))


def test_evaluation_during_training_and_the_best_model(tmp_path):
    args = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
            "metric_for_best_model": "eval_mean_token_accuracy", "load_best_model_at_end": True}  # fmt: skip
    evaluated = []
    for number, cls in enumerate(SWAP):
        trainer = trained(build(cls, tmp_path / str(number), args=args, eval_dataset=dataset(6, seed=5)))
        assert trainer.state.best_model_checkpoint
        evaluated.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
    assert len(evaluated[0]) == 3
    assert_trajectory(*evaluated)


def test_predictions_are_rows_of_logits_as_padded(tmp_path):
    options = {"compute_metrics": lambda prediction: {"mine": 0.123}, "eval_dataset": dataset(6, seed=5)}
    found = []
    for trainer in both(tmp_path, **options):
        assert trainer.evaluate()["eval_mine"] == 0.123
        found.append(trainer.predict(trainer.eval_dataset))
    assert found[0].predictions.shape == found[1].predictions.shape
    assert found[1].predictions.shape[-1] == tiny.VOCAB


def test_callbacks_and_optimizers_are_the_users(tmp_path):
    class Counter(TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

    for cls in SWAP:
        model, counter = tiny.model(layers=2), Counter()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        trainer = trained(build(cls, tmp_path, model=model, callbacks=[counter], optimizers=(optimizer, None)))
        assert counter.steps == 3 and trainer.optimizer.optimizer is optimizer


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped", *exhaustive("bfd")])
def test_trls_packing_strategies_train_under_their_names(tmp_path, strategy):
    args = {"packing": True, "packing_strategy": strategy, "max_length": 64, "per_device_train_batch_size": 1}
    data = Dataset.from_list(FORMATS["text"])
    for trainer in train_both(tmp_path, data, args=args, eval_dataset=dataset(6, seed=5)):
        assert len(losses(trainer)) == 3
    args["eval_packing"] = False
    ours = build(PackedSFTTrainer, tmp_path, data, args=args, eval_dataset=dataset(6, seed=5))
    assert ours.evaluate()["eval_loss"] > 0


def test_every_refusal_of_ours_is_a_value_error():
    """Scripts that guard TRL's configuration errors guard ours."""
    assert issubclass(PackingError, ValueError)
