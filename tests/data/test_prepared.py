"""`trl-packfa prepare`: data is tokenized, cut and counted once; a run takes it as it is, or refuses it."""

import json

import pytest
import tiny
from datasets import Dataset, DatasetDict
from training import arguments, built_trainers, losses, packed_trainer, rows
from trl import SFTTrainer

from trl_packfa.cli.main import main
from trl_packfa.data.prepared import Prepared
from trl_packfa.errors import InvalidConfig

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
