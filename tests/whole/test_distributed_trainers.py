"""Two real processes on a CPU (gloo): packed preference trainers beside TRL's, whose losses and means over pairs
they log, their pairs dealt over both ranks; and a trainer of embeddings with and without pads."""

from importlib.util import find_spec

import distributed_trainers
import pytest
import tiny
from launches import launch_whole
from tiny_models.encoders import EMBEDDINGS, small_encoder
from tolerance import assert_trajectory
from trl_trainers import OF_MICRO_BATCHES, beyond

pytestmark = pytest.mark.slow

RUNS = {
    "dpo": {"kind": "dpo"},
    "dpo, LoRA": {"kind": "dpo", "lora": True},
    "reward": {"kind": "reward"},
    "kto": {"kind": "kto"},
    "kto without KL": {"kind": "kto", "loss_type": "apo_zero_unpaired"},
}


@pytest.fixture(scope="module")
def two(folder):
    runs = dict(RUNS)
    if find_spec("sentence_transformers"):
        small_encoder("bert", EMBEDDINGS).save_pretrained(folder / "model")
        tiny.save_tokenizer(folder / "model")
        runs["embeddings"] = {"kind": "embeddings", "model": str(folder / "model")}
    scenarios = {f"{name}, {which}": {**options, "packed": which == "packed"}
                 for name, options in runs.items() for which in ("padded", "packed")}  # fmt: skip
    return launch_whole("distributed_trainers.py", folder, scenarios)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_log_what_trls_two_do(two, name):
    padded, packed = two[f"{name}, padded"], two[f"{name}, packed"]
    is_kept = name == "kto"
    assert not beyond(padded, packed, besides=() if is_kept else OF_MICRO_BATCHES[RUNS[name]["kind"]])
    if not is_kept:
        assert all(entry["micro_batches"] <= 4 and entry["imbalance"] < 1.5 for entry in packed)
        assert any(entry["micro_batches"] < 4 for entry in packed)


def test_one_process_trains_the_same(two, tmp_path):
    """Of as many pairs a step; which rank pads beside whom is all that differs."""
    alone = distributed_trainers.run(str(tmp_path), kind="reward", packed=True)
    assert not beyond(alone, two["reward, packed"], only=("loss",))


def test_two_processes_train_embeddings_as_padded(two):
    pytest.importorskip("sentence_transformers")
    padded, free = ([[*entry.values()] for entry in two[f"embeddings, {which}"]] for which in ("padded", "packed"))
    assert len(padded) == 4
    assert_trajectory(free, padded)
