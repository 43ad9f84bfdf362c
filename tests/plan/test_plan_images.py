"""`trl-packfa plan` on images: some rows are processed, and image tokens count."""

import json

import numpy as np
import pytest
import vision

from trl_packfa.cli.main import main
from trl_packfa.data.batching import Batching
from trl_packfa.packing import STEP, fewest_micro_batches
from trl_packfa.plan import gather


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
