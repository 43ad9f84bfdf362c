"""`trl-packfa plan` as a user meets it: tables, page, messages."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiny
import vision
from calls import calls_of
from training import arguments

from trl_packfa.cli.main import main
from trl_packfa.data.batching import Batching
from trl_packfa.packing import STEP, fewest_micro_batches
from trl_packfa.plan import gather
from trl_packfa.plan.gather import lengths_from_file
from trl_packfa.plan.run import make_plan


def test_the_command_shows_tables_and_json(saved, capsys):
    argv = ["plan", "--dataset_name", saved["DATA"], "--output_dir", saved["DIR"] + "/out", "--bf16", "true"]
    assert main([*argv, "--model_name_or_path", saved["MODEL"], "--ranks", "2,1"]) == 0
    text = capsys.readouterr().out
    for part in ("24 documents", "step *", "bfd_split", "2 GPUs: steps", "GB on one GPU", "Use packing_strategy"):
        assert part in text, part
    assert main([*argv, "--tokenizer", saved["MODEL"], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["documents"] == 24 and plan["model"] is None and plan["memory_formula"] is None
    assert plan["strategies"]["step"]["cut"]["trained_tokens"] < plan["strategies"]["step"]["cut"]["packed_tokens"]


def test_the_command_takes_yaml_and_lengths(saved, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nmax_length: 64\npacking_strategy: bfd\nbf16: true\n")
    (tmp_path / "lengths.json").write_text("[5, 60, 100, 7]")
    argv = ["plan", "--config", str(tmp_path / "run.yaml"), "--lengths", str(tmp_path / "lengths.json")]
    assert main([*argv, "--max_length", "80", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["arguments"]["max_length"] == 80 and plan["arguments"]["packing_strategy"] == "bfd"
    assert plan["strategies"]["bfd"]["cut"]["tokens_lost"] == 20


def test_the_command_tells_what_shared_histories_save(saved, tmp_path, capsys):
    turns = [{"role": role, "content": tiny.words(20, seed=i)} for i in range(3) for role in ("user", "assistant")]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for _ in range(10)))
    argv = ["plan", "--dataset_name", str(tmp_path / "chat.jsonl"), "--tokenizer", saved["MODEL"], "--bf16", "true"]
    argv += ["--output_dir", str(tmp_path / "out"), "--expand_turns", "true", "--json"]
    assert main(argv) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["documents"] == 10 and "10 conversations are 30 turns" in plan["advice"][-1]
    assert "2.0 times fewer" in plan["advice"][-1]


@pytest.mark.parametrize(("argv", "message"), [
    (["--dataset_name", "DATA"], "InvalidConfig: no tokenizer"),
    (["--tokenizer", "MODEL"], "InvalidConfig: no dataset"),
    (["--dataset_name", "DATA", "--tokenizer", "/nowhere"], "processor from '/nowhere'"),
    (["--dataset_name", "DATA", "--model_name_or_path", "/nowhere"], "cannot make the model '/nowhere'"),
    (["--dataset_name", "DATA", "--tokenizer", "MODEL", "--dataset_streaming", "true"], "is a stream"),
    (["--dataset_name", "DATA", "--tokenizer", "MODEL", "--assistant_only_loss", "true"], "has a role"),
    (["--dataset_name", "DATA", "--tokenizer", "MODEL", "--overflow", "error", "--max_length", "9"],
     "overflow='error'"),
    (["--dataset_name", "DATA", "--tokenizer", "MODEL", "--max_tokens_per_microbatch", "3"],
     "max_tokens_per_microbatch=3 is smaller than document"),
    (["--dataset_name", "PACKED", "--tokenizer", "MODEL"], "its rows were packed before"),
    (["--lengths", "/nowhere.json"], "cannot read lengths from /nowhere.json"),
    (["--lengths", "DATA"], "cannot read lengths from"),
    (["--lengths", "EMPTY"], "is not a list of document lengths"),
    (["--lengths", "FLOATS"], "is not a list of document lengths"),
    (["--lengths", "ZERO"], "is not a list of document lengths"),
    (["--lengths", "HUGE"], "has a document of 1,000,000,000,000 tokens"),
    (["--lengths", "GOOD", "--ranks", "1,none"], "--ranks 1,none is not a list"),
    (["--lengths", "GOOD", "--ranks", "0"], "--ranks 0 is not a list"),
    (["--lengths", "GOOD", "--packing_strategy", "bfd", "--max_length", "none"], "max_length"),
    (["--lengths", "GOOD", "--learning_speed", "1"], "learning_speed"),
])  # fmt: skip
def test_user_errors_are_one_message_without_traceback(saved, tmp_path, capsys, argv, message):
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "seq_lengths": [2, 1]}
    files = {"EMPTY": [], "FLOATS": [1.5, 2], "ZERO": [3, 0], "GOOD": [5, 9, 4], "HUGE": [10**12, 3], "PACKED": row}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        saved[name] = str(tmp_path / f"{name}.json")
    assert main(["plan", "--output_dir", str(tmp_path), *(saved.get(word, word) for word in argv)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert main(["plan", "--output_dir", str(tmp_path), "--lengths", saved["GOOD"]]) == 0, "the files are fine"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_million_documents_take_little_memory(tmp_path):
    """Lengths only."""
    lengths = np.exp(np.random.default_rng(0).normal(5.3, 0.8, 1_000_000)).astype(np.int64).clip(2, 20_000)
    (tmp_path / "lengths.json").write_text(json.dumps(lengths.tolist()))
    args = arguments(out=tmp_path, max_length=4096, gradient_accumulation_steps=4, max_steps=-1)
    tracemalloc.start()
    plan = make_plan(lengths_from_file(str(tmp_path / "lengths.json")), args, [1, 8])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.padded.epoch().steps == -(-1_000_000 // 16)
    assert peak < 4e8


def test_planning_grows_with_the_documents_and_no_faster(tmp_path):
    """Counted, not timed: a million take some seconds."""
    args, calls = arguments(out=tmp_path, max_length=4096, gradient_accumulation_steps=4, max_steps=-1), []
    for count in (2_000, 8_000):
        lengths = np.exp(np.random.default_rng(0).normal(5.3, 0.8, count)).astype(np.int64).clip(2, 20_000)
        (tmp_path / "lengths.json").write_text(json.dumps(lengths.tolist()))
        documents = lengths_from_file(str(tmp_path / "lengths.json"))
        calls.append(calls_of(lambda documents=documents: make_plan(documents, args, [1, 8]))[1])
    assert calls[1] < 5 * calls[0]


def test_the_pages_commands_run(saved, tmp_path, capsys, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    lines = [line.split()[1:] for line in page.splitlines() if line.startswith("trl-packfa plan ")]
    (tmp_path / "lengths.json").write_text("[5, 60, 100, 7]")
    (tmp_path / "run.yaml").write_text(f"dataset_name: {saved['DATA']}\nmodel_name_or_path: {saved['MODEL']}\n")
    names = {"my_data.jsonl": saved["DATA"], "my_model": saved["MODEL"]}
    monkeypatch.chdir(tmp_path)
    assert len(lines) == 4
    for line in lines:
        assert main([names.get(word, word) for word in line]) == 0, line
        assert capsys.readouterr().out


@pytest.fixture
def argv(tmp_path):
    for part in vision.family("llava"):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    vision.uneven(24, without=(3,)).to_parquet(tmp_path / "data" / "train.parquet")
    return [
        "plan", "--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data"),
        "--output_dir", str(tmp_path / "out"), "--bf16", "false", "--ranks", "2", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "3",
    ]  # fmt: skip


def test_lengths_hold_the_tokens_of_images(argv, capsys, monkeypatch):
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # Words of prompt and answer, four marks of the template, and four tokens for each image.
    rows = enumerate(vision.uneven(24, without=(3,)))
    expected = [(1 + i * 7 % 31) + (1 + i % 9) + 4 + 4 * len(row["images"]) for i, row in rows]
    assert plan["documents"] == 24 and plan["lengths"]["longest"] == max(expected)
    assert plan["lengths"]["mean"] == pytest.approx(np.mean(expected))
    assert set(plan["strategies"]) == {"padded", "minibatch", "step"} and plan["model"]["model_type"] == "llava"
    remark = plan["advice"][-1]
    assert f"24 of 24 rows were processed, and their lengths stand for all. {4 * 27 / sum(expected):.0%}" in remark
    monkeypatch.setattr(gather, "_PROCESSED", 4)
    assert main([*argv, "--max_length", "20"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "4 of 24 rows were processed" in text and "rows of images cannot be filled before training" in text
    assert "of the processed rows are longer than max_length=20: a cut through an image is refused" in text


def test_what_the_trainer_refuses_is_refused(argv, capsys):
    assert main([*argv, "--packing_strategy", "bfd", "--max_length", "64"]) != 0
    assert "rows cannot be filled before training: the dataset has images" in capsys.readouterr().err


def test_each_rank_cuts_its_own_examples():
    sizes = {"batch_size": 2, "accumulation": 2, "world_size": 2, "keeps_ranks": True}
    # Two rounds of two ranks: the largest padded micro-batch has 2 rows of 9.
    step = np.array([[[9, 1], [2, 2]], [[3, 4], [2, 1]]])
    dealt = Batching(STEP, **sizes).recut(step, budget=1000)
    assert [sorted(np.concatenate(rank).tolist()) for rank in dealt] == [[1, 3, 4, 9], [1, 2, 2, 2]]
    assert [len(rank) for rank in dealt] == [1, 1] and fewest_micro_batches(np.array([9, 1, 3, 4]), 18) == 1
    small = Batching(STEP, **sizes, budget=9).recut(step, budget=1)
    assert [len(rank) for rank in small] == [2, 2] and all(part.sum() <= 9 for rank in small for part in rank)
