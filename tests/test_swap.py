"""TRL's own SFT behaviour is the yardstick: what its trainer does, ours does under a swap of the class name.

Each behaviour that TRL's test suite asserts of `SFTTrainer`, on small local models, with `use_peft=False`. What
differs is in README's table of differences.
"""

import json

import pytest
import tiny
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import LoraConfig
from snippets import shorten_training
from tolerance import assert_trajectory
from training import FORMATS, arguments, dataset, losses, rows
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_packfa import PackedSFTConfig, PackedSFTTrainer
from trl_packfa.errors import PackingError
from trl_packfa.zoo import small_model

SWAP = {SFTTrainer: SFTConfig, PackedSFTTrainer: PackedSFTConfig}
TOOL = {"type": "function", "function": {"name": "add", "description": "1 2", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}


def turns(key="role", value="content"):
    return [
        [{key: "user", value: tiny.words(n, seed=n)}, {key: "assistant", value: tiny.words(n % 5 + 1, seed=-n)}]
        for n in range(2, 26)
    ]


def masked(name):
    """Pre-tokenized, with a mask of what is trained instead of labels."""
    return [{"input_ids": list(range(5, 7 + n)), name: [0] * n + [1, 1]} for n in range(2, 26)]


DATA = {
    **FORMATS,
    "tools": [{"messages": m, "tools": [TOOL]} for m in turns()],
    "tools as JSON": [{"messages": m, "tools": json.dumps([TOOL])} for m in turns()],
    "conversations, not ChatML": [{"conversations": m} for m in turns("from", "value")],
    "ids only": [{"input_ids": list(range(5, 7 + n))} for n in range(2, 26)],
    "assistant masks": masked("assistant_masks"),
    "completion masks": masked("completion_mask"),
    "template arguments": [
        {"messages": m, "chat_template_kwargs": {"loud": bool(i % 2)}} for i, m in enumerate(turns())
    ],
    "a long text": [{"text": tiny.words(n * 7, seed=n)} for n in range(2, 26)],
}  # fmt: skip
OPTIONS = {
    "tools": {"assistant_only_loss": True},
    "messages": {"assistant_only_loss": True},
    "conversational prompt-completion": {"assistant_only_loss": True, "completion_only_loss": True},
    "a long text": {"max_length": 32},
    "prompt-completion": {"max_length": None},
}


def tokenizer():
    """One whose template knows tools and an argument of its own."""
    made = tiny.tokenizer(["USER", "ASSISTANT", "tools"])
    tools = "{% if tools %}{{ 'tools ' }}{% endif %}"
    made.chat_template = tools + made.chat_template.replace(
        "m['role'] + ' '", "(m['role'] | upper if loud else m['role']) + ' '"
    )
    return made


def build(cls, out, data=None, *, model=None, args=None, **options):
    """The trainer that a script would build, whichever class it names; full fine-tuning on both sides."""
    ours = {"use_peft": "peft_config" in options} if cls is PackedSFTTrainer else {}
    config = arguments(SWAP[cls], out, **ours, **{"learning_rate": 1e-3, **(args or {})})
    data = dataset(24) if data is None else data
    options = {"train_dataset": data, "processing_class": tokenizer(), **options}
    return cls(tiny.model(layers=2) if model is None else model, config, **options)


def both(out, data=None, **options):
    return [build(cls, out, data, **options) for cls in SWAP]


def train_both(out, data=None, **options):
    trainers = both(out, data, **options)
    for trainer in trainers:
        trainer.train()
    return trainers


def snapshot(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def moved(trainer, before):
    """The parameters that training has changed."""
    return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


# Data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", DATA)
def test_every_dataset_format_is_prepared_and_trained_alike(tmp_path, kind, streaming):
    data = Dataset.from_list(DATA[kind])
    data = data.to_iterable_dataset() if streaming else data
    args = {**OPTIONS.get(kind, {}), "max_steps": 2}
    if streaming and args.get("max_length", 0) is None:
        args["packing_strategy"] = "minibatch"  # step needs a token budget, see README
    theirs, ours = both(tmp_path, data, args=args)
    before = snapshot(ours)
    prepared = [
        [(row["input_ids"], list(row.get("labels") or row["input_ids"])) for row in trainer.train_dataset]
        for trainer in (theirs, ours)
    ]
    assert prepared[1] == prepared[0]
    theirs.train(), ours.train()
    assert_trajectory(losses(ours), losses(theirs))
    assert moved(ours, before) == moved(theirs, before) and len(moved(ours, before)) > 10


def test_formatting_func(tmp_path):
    data = Dataset.from_list([{"question": tiny.words(n, seed=n), "answer": "4 5"} for n in range(2, 26)])
    trainers = train_both(tmp_path, data, formatting_func=lambda row: f"{row['question']} {row['answer']}")
    assert_trajectory(*map(losses, trainers))


def test_documents_without_a_trained_token_are_dropped_after_truncation(tmp_path):
    data = Dataset.from_list([
        {"input_ids": [5, 6, 7, 8, 9], "assistant_masks": [0, 0, 0, 1, 1]},
        {"input_ids": [6, 7, 8], "assistant_masks": [1, 1, 1]},
    ])  # fmt: skip
    for trainer in both(tmp_path, data, args={"max_length": 3}):
        assert trainer.train_dataset[:]["labels"] == [[6, 7, 8]]


def test_labels_of_the_user_are_kept(tmp_path):
    data = Dataset.from_list([
        {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, -100], "assistant_masks": [1, 1, 1, 1]},
        {"input_ids": [5, 6], "labels": [-100, 6], "assistant_masks": [1, 1]},
    ])  # fmt: skip
    for trainer in both(tmp_path, data):
        assert trainer.train_dataset[:]["labels"] == [[5, -100, 7, -100], [-100, 6]]


def test_a_prepared_dataset_is_left_alone(tmp_path):
    prepared = Dataset.from_list(
        [{"input_ids": list(range(5, 7 + n)), "labels": list(range(5, 7 + n))} for n in range(24)]
    )
    trainers = train_both(tmp_path, prepared, args={"dataset_kwargs": {"skip_prepare_dataset": True}})
    assert_trajectory(*map(losses, trainers))
    masks = Dataset.from_list(masked("assistant_masks"))
    for cls in SWAP:
        with pytest.raises(ValueError, match="labels"):
            build(cls, tmp_path, masks, args={"dataset_kwargs": {"skip_prepare_dataset": True}})


@pytest.mark.parametrize("data", [None, DatasetDict({"train": dataset(4)})], ids=["none", "dict"])
def test_what_is_no_training_dataset_is_refused(tmp_path, data):
    for cls in SWAP:
        with pytest.raises((ValueError, TypeError), match="train_dataset"):
            build(cls, tmp_path, train_dataset=data)


# Models, adapters ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_gradient_checkpointing(tmp_path, adapter, reentrant):
    options = {"peft_config": LoraConfig(r=4)} if adapter else {}
    args = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    theirs, ours = train_both(tmp_path, args=args, **options)
    assert_trajectory(losses(ours), losses(theirs))


def test_experts_take_the_architectures_auxiliary_loss(tmp_path):
    theirs, ours = both(tmp_path, model=small_model("qwen3_moe", num_hidden_layers=2, router_aux_loss_coef=0.01))
    assert ours.router_aux_loss_coef == theirs.router_aux_loss_coef == 0.01
    assert ours.aux_loss_enabled and theirs.aux_loss_enabled
    for cls in SWAP:
        with pytest.raises(ValueError, match="not a Mixture-of-Experts model"):
            build(cls, tmp_path, args={"router_aux_loss_coef": 0.5})


# Templates, special tokens ------------------------------------------------------------------------------------------


def test_a_chat_template_from_a_file_is_used_and_saved(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] + ' </s> ' }}{% endfor %}")
    args = {"chat_template_path": str(template), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for number, cls in enumerate(SWAP):
        trainer = build(cls, tmp_path / str(number), Dataset.from_list(FORMATS["messages"]), args=args)
        trainer.train()
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


# Losses, metrics, evaluation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"max_grad_norm": 0.1}, {"warmup_steps": 2}],
    ids=lambda args: next(iter(args)),
)  # fmt: skip
def test_training_arguments_mean_the_same(tmp_path, args):
    theirs, ours = train_both(tmp_path, args=args)
    assert_trajectory(losses(ours), losses(theirs))


def test_noisy_embeddings_train(tmp_path):
    """Noise is drawn per position and scaled by the length, which packing changes: no equal losses."""
    trainer = build(PackedSFTTrainer, tmp_path, args={"neftune_noise_alpha": 5.0})
    trainer.train()
    assert len(losses(trainer)) == 3


def test_compute_loss_func_gets_the_models_own_outputs(tmp_path):
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    assert_trajectory(*map(losses, train_both(tmp_path, compute_loss_func=compute_loss_func)))


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("kind", ["one", "dict", "DatasetDict"])
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
        trainer = build(cls, tmp_path / str(number), args=args, eval_dataset=dataset(6, seed=5))
        trainer.train()
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
        trainer = build(cls, tmp_path, model=model, callbacks=[counter], optimizers=(optimizer, None))
        trainer.train()
        assert counter.steps == 3 and trainer.optimizer.optimizer is optimizer


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_trls_packing_strategies_train_under_their_names(tmp_path, strategy):
    args = {"packing": True, "packing_strategy": strategy, "max_length": 64, "per_device_train_batch_size": 1}
    data = Dataset.from_list(FORMATS["text"])
    for trainer in train_both(tmp_path, data, args=args, eval_dataset=dataset(6, seed=5)):
        assert len(losses(trainer)) == 3
    ours = build(
        PackedSFTTrainer, tmp_path, data, args={**args, "eval_packing": False}, eval_dataset=dataset(6, seed=5)
    )
    assert ours.evaluate()["eval_loss"] > 0


def test_every_refusal_of_ours_is_a_value_error():
    """Scripts that guard TRL's configuration errors guard ours."""
    assert issubclass(PackingError, ValueError)
    assert rows(1)
