"""Rows that were packed before training (TRL's `pack_dataset`), a user's columns that are named like ours, and data
that `trl-packfa prepare` has tokenized, cut and counted: a run takes it as it is, or refuses it."""

import json
from collections import Counter
from itertools import chain

import pytest
import tiny
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from training import arguments, batches_of, built_trainers, losses, packed_trainer, rows
from trl import SFTTrainer, pack_dataset

from trl_packfa.cli.main import main
from trl_packfa.data.collator import LOSSES, SOURCES, DataCollatorForPacking
from trl_packfa.data.prepared import Prepared
from trl_packfa.errors import InvalidConfig, InvalidDataset

DOCUMENTS = [
    {"input_ids": [5 + (i + j) % 20 for j in range(2 + i % 9)], "labels": [-100] * (1 + i % 9) + [6]}
    for i in range(60)
]
LONGER = [pytest.param(length, False, marks=pytest.mark.slow) for length in (20, 64)]
STRATEGIES = ["step", "minibatch", "bfd", "bfd_split", "wrapped"]


def packed_before(length=20):
    rows = pack_dataset(Dataset.from_list(DOCUMENTS), length, "bfd")
    return rows.add_column("source", [str(i % 3) for i in range(len(rows))])


def documents_of(batches):
    return [tuple(ids.tolist()) for batch in batches for ids in batch["packed_layout"].split(batch["input_ids"])]


def watched(trainer):
    seen = batches_of(trainer)
    trainer.train()
    return seen


@pytest.mark.parametrize(("max_length", "streams"), [(16, False), (16, True), *LONGER])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_of_rows_stay_whole_under_every_strategy(tmp_path, strategy, max_length, streams):
    """Rows are examples of `step` and `minibatch`, as TRL's padding-free run has them; other rows are filled with
    their documents, all shorter than any of these lengths. `wrapped` cuts them where it fills a row."""
    length = {"max_steps": 3} if streams else {"max_steps": -1, "num_train_epochs": 1}
    args = arguments(out=tmp_path, packing_strategy=strategy, max_length=max_length, loss_by="source",
                     check_packing=False, **length)  # fmt: skip
    rows = packed_before()
    trainer = packed_trainer(args, train_dataset=rows.to_iterable_dataset() if streams else rows)
    batches = watched(trainer)
    assert all(len(batch[SOURCES]) == batch["packed_layout"].num_documents for batch in batches)
    if streams:
        assert len(batches) >= 3 and (strategy == "wrapped" or set(documents_of(batches)) <= set(all_documents()))
        return
    if strategy == "wrapped":
        assert Counter(chain(*documents_of(batches))) == Counter(chain(*all_documents()))
    else:
        assert sorted(documents_of(batches)) == sorted(all_documents())
    assert {"loss/0", "loss/1", "loss/2"} <= set(trainer.state.log_history[0])
    report = trainer.packing_reports["train"]
    assert report.tokens_lost == 0 and report.tokens == sum(len(d["input_ids"]) for d in DOCUMENTS)
    assert report.trained_tokens == len(DOCUMENTS) or strategy == "wrapped"  # which cuts documents of one label


def all_documents():
    return [tuple(document["input_ids"]) for document in DOCUMENTS]


@pytest.mark.parametrize("packs", [None, False])
def test_rows_are_evaluated_by_document(tmp_path, packs):
    """Padded, TRL's collator would let a row's documents see each other."""
    args = arguments(out=tmp_path, max_length=20, eval_packing=packs, max_steps=1)
    trainer, seen = packed_trainer(args, eval_dataset={"rows": packed_before()}), []
    collate, trainer.data_collator = trainer.data_collator, lambda rows: seen.append(collate(rows)) or seen[-1]
    loss = trainer.evaluate()["eval_rows_loss"]
    if packs is None:
        assert sorted(documents_of(seen)) == sorted(all_documents())
    else:
        assert not seen
        assert loss == trainer.evaluate(Dataset.from_list(documents_in_order()))["eval_loss"]


def documents_in_order():
    names = ("input_ids", "labels")
    parts = [[torch.tensor(row[name]).split(row["seq_lengths"]) for name in names] for row in packed_before()]
    documents = [document for row in parts for document in zip(*row, strict=True)]
    return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in documents]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("lengths", "message"), [
    ([3, 3], r"'seq_lengths' sums up to 6 tokens, its input_ids have 5"),
    ([5, 0], r"'seq_lengths' is \[5, 0\], not a list of document lengths"),
    (None, r"'seq_lengths' is None, not a list"),
])  # fmt: skip
def test_lengths_that_do_not_make_the_row_are_refused_by_name(tmp_path, stream, lengths, message):
    rows = [{"input_ids": [5] * 5, "seq_lengths": [2, 3]}, {"input_ids": [5] * 5, "seq_lengths": lengths}]
    data = IterableDataset.from_generator(lambda: iter(rows)) if stream else Dataset.from_list(rows)
    with pytest.raises(InvalidDataset, match=r"document 1 of the train dataset: " + message):
        packed_trainer(arguments(out=tmp_path, max_length=20), train_dataset=data).train()


NAMED = {LOSSES: "x", "packing_losses": "x", "sources": [1], "origins": [1], "packed_layout": "x", "position_ids": [9]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["step", "bfd"])
def test_a_users_columns_may_be_named_like_ours(tmp_path, strategy, stream):
    """Also where they reach the collator; of documents that are not tokenized `seq_lengths` is a user's as well."""
    rows = [{"text": tiny.words(3 + i % 7, seed=i), "seq_lengths": i, **NAMED} for i in range(40)]

    def trained(columns):
        data = Dataset.from_list(rows).select_columns(columns)
        args = arguments(out=tmp_path, packing_strategy=strategy, max_length=64, remove_unused_columns=False)
        trainer = packed_trainer(args, train_dataset=data.to_iterable_dataset() if stream else data)
        trainer.train()
        return losses(trainer)

    assert trained(["text", "seq_lengths", *NAMED]) == trained(["text"])


@pytest.mark.parametrize("column", ["input_ids", "labels", LOSSES])
def test_a_column_of_tokens_is_no_source(tmp_path, column):
    with pytest.raises(InvalidConfig, match=rf"loss_by='{column}'(.|\n)*columns: .*source"):
        packed_trainer(arguments(out=tmp_path, loss_by=column), train_dataset=packed_before())


def test_a_packed_row_names_its_source_for_each_document():
    rows = [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1], "from": "a"}, {"input_ids": [8, 9], "from": "b"}]
    assert DataCollatorForPacking(source_column="from")(rows)[SOURCES] == ("a", "a", "b")


CUT = ["--max_length", "24", "--overflow", "split"]


@pytest.fixture
def saved(tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, count in (("train", 40), ("test", 8)):
        lines = [json.dumps(row) for row in rows(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(saved, command, data, out, *more):
    named = {"model_name_or_path": saved / "model", "dataset_name": data, "output_dir": out, "use_cpu": True,
             "report_to": "none", "eval_strategy": "epoch"}  # fmt: skip
    return main([command, *(word for name, value in named.items() for word in (f"--{name}", str(value))), *more])


def prepared(saved, *more, out="prepared"):
    assert run(saved, "prepare", saved / "data", saved / out, *CUT, *more) == 0
    return saved / out


TRAINING = ["--max_steps", "3", "--logging_steps", "1", "--per_device_train_batch_size", "4", "--save_strategy", "no",
            "--learning_rate", "1e-2", "--check_packing", "false"]  # fmt: skip


@pytest.mark.parametrize("strategy", ["step", pytest.param("bfd", marks=pytest.mark.slow)])
def test_a_run_on_prepared_data_is_the_run_on_the_text(saved, strategy, monkeypatch, capsys):
    more = [*CUT, "--packing_strategy", strategy]
    folder = prepared(saved, "--packing_strategy", strategy)
    assert f"To train: trl-packfa train --dataset_name {folder}" in capsys.readouterr().out
    built = built_trainers(monkeypatch)
    assert run(saved, "train", saved / "data", saved / "direct", *TRAINING, *more) == 0
    with monkeypatch.context() as patched:
        patched.setattr(SFTTrainer, "_prepare_dataset", lambda *args, **kwargs: pytest.fail("tokenized again"))
        assert run(saved, "train", folder, saved / "again", *TRAINING, *more) == 0
    direct, again = built
    assert losses(direct) == losses(again) and len(losses(again)) == 3
    assert direct.packing_reports == again.packing_reports and direct.packing_reports["train"].split
    assert again.train_dataset.to_dict() == direct.train_dataset.to_dict()


@pytest.mark.parametrize(("changed", "told"), [
    (["--max_length", "20"], "max_length: 24 then, 20 now"),
    (["--packing_strategy", "bfd"], "documents are cut for filled rows: False, False then, True, False now"),
    (["--completion_only_loss", "false"], "completion_only_loss: None then, False now"),
])  # fmt: skip
def test_other_settings_are_refused(saved, changed, told, capsys):
    folder = prepared(saved)
    assert run(saved, "train", folder, saved / "out", *TRAINING, *CUT, *changed) == 1
    error = capsys.readouterr().err
    assert "the train dataset was prepared with other settings" in error and told in error


def test_another_tokenizer_or_template_is_refused(saved):
    train = DatasetDict.load_from_disk(str(prepared(saved)))["train"]
    args = arguments(out=saved / "a", max_length=24, overflow="split")
    assert packed_trainer(args, train_dataset=train).packing_reports["train"].split
    larger, other = tiny.tokenizer(["another"]), tiny.tokenizer()
    other.chat_template = "{{ messages }}"
    for tokenizer, what in ((larger, "tokenizer"), (other, "chat template")):
        with pytest.raises(InvalidConfig, match=rf"{what}: .* then, .* now"):
            packed_trainer(args, train_dataset=train, processing_class=tokenizer)


def test_documents_that_were_filtered_since_are_an_ordinary_dataset(saved):
    train = DatasetDict.load_from_disk(str(prepared(saved)))["train"]
    assert Prepared.of(train).documents == len(train) and Prepared.of(Dataset.from_list(rows(3))) is None
    fewer = train.select(range(10))
    assert Prepared.of(fewer) is None
    trainer = packed_trainer(arguments(out=saved / "a", max_length=12), train_dataset=fewer)
    assert trainer.packing_reports["train"].documents == 10 and trainer.packing_reports["train"].truncated


def test_tokens_are_counted_once(saved, monkeypatch):
    folder = prepared(saved)
    counted = sorted(folder.rglob("cache-*.arrow"))
    train = DatasetDict.load_from_disk(str(folder))["train"]
    args = arguments(out=saved / "a", max_length=24, overflow="split")
    described = []
    own = Dataset.map

    def noted(*given, **options):
        described.append(options["desc"])
        return own(*given, **options)

    monkeypatch.setattr(Dataset, "map", noted)
    assert packed_trainer(args, train_dataset=train).packing_plan
    new = set(folder.rglob("cache-*.arrow")) - set(counted)
    looks = {desc for desc in described if desc.startswith("Looking at")}
    assert counted and "Counting tokens" in described and len(new) == len(looks), "the counts are there already"


@pytest.mark.parametrize(("more", "told"), [
    ([], "is not empty"),
    (["--packing", "false", "--output_dir", "NEW"], "TRL prepares padded data itself"),
    (["--dataset_streaming", "true", "--output_dir", "NEW"], "the train dataset is a stream"),
])  # fmt: skip
def test_what_cannot_be_prepared_is_refused(saved, more, told, capsys):
    folder = prepared(saved)
    more = [str(saved / "new") if word == "NEW" else word for word in more]
    assert run(saved, "prepare", saved / "data", folder, *CUT, *more) == 1
    assert told in capsys.readouterr().err
