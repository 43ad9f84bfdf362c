"""Two real processes on a CPU (gloo): packed preference trainers beside TRL's, whose losses and means over pairs
they log, their pairs dealt over both ranks."""

import distributed_preference
import pytest
from launches import launch_whole
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
    scenarios = {f"{name}, {which}": {**options, "packed": which == "packed"}
                 for name, options in RUNS.items() for which in ("padded", "packed")}  # fmt: skip
    return launch_whole("distributed_preference.py", folder, scenarios)


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
    alone = distributed_preference.run(str(tmp_path), kind="reward", packed=True)
    assert not beyond(alone, two["reward, packed"], only=("loss",))
