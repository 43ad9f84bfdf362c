"""TRL's own SFT behaviour is the yardstick: what its trainer does, ours does under a swap of the class name. Each
behaviour that TRL's test suite asserts of `SFTTrainer`, on small local models, with `use_peft=False`. What differs is
in README's table of differences."""

import json

import pytest
import tiny
from datasets import Dataset, DatasetDict
from selection import exhaustive
from swap import SWAP, both, build, moved, snapshot, train_both
from tolerance import assert_trajectory
from training import FORMATS, dataset, losses

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


MAPPED, STREAMED = ([(streaming, kind) for kind in DATA] for streaming in (False, True))


@pytest.mark.parametrize("streaming, kind", [*MAPPED, *STREAMED[::2], *exhaustive(*STREAMED[1::2])], ids=str)
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


def test_formatting_func_trains_as_in_sft_trainer(tmp_path):
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
    documents = [list(range(5, 7 + n)) for n in range(24)]
    prepared = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in documents])
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
