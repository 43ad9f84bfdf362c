"""Two real processes on a CPU (gloo): steps on images, re-cut on each rank, beside TRL's padded ones."""

import pytest
from image_runs import differing
from launches import launch_whole
from selection import LAUNCHES, chosen
from tolerance import CONTROL

pytestmark = list(LAUNCHES)

# Options of both sides, and of ours.
RUNS = {
    "llava": ({}, {"max_tokens_per_microbatch": 150}),
    "qwen3_vl, a mean over each micro-batch": ({"family": "qwen3_vl"}, {}),
    "rows without images": ({"without": [1, 3, 6, 7, 8, 9, 11, 12]}, {}),
    "many micro-batches": ({}, {"max_tokens_per_microbatch": 30}),
    "a mean over each rank": ({"average_tokens_across_devices": False}, {}),
    "FSDP2": ({"fsdp": True}, {"max_tokens_per_microbatch": 300}),
    "ZeRO-2": ({"zero": 2}, {"max_tokens_per_microbatch": 300}),
    "ZeRO-3": ({"zero": 3}, {"max_tokens_per_microbatch": 300}),
    "DPO": ({"kind": "DPO", "gradient_accumulation_steps": 2}, {"max_tokens_per_microbatch": 200}),
}
RUNS = chosen(RUNS, "llava", "qwen3_vl, a mean over each micro-batch", "rows without images", "FSDP2", "DPO")
REFUSED = {"fsdp": True, "without": [3]}


@pytest.fixture(scope="module")
def two(folder):
    scenarios = {f"{name}, padded": {**both, "padded": True} for name, (both, _) in RUNS.items()}
    scenarios |= {f"{name}, re-cut": {**both, **ours} for name, (both, ours) in RUNS.items()}
    return launch_whole("image_runs.py", folder, {**scenarios, "refused": REFUSED})


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_trls_two_do(two, name):
    padded, recut = two[f"{name}, padded"], two[f"{name}, re-cut"]
    assert not differing(padded, recut)
    counts = [entry["micro_batches"] for entry in recut]
    assert max(counts) > 3 if name == "many micro-batches" else min(counts) < 3 or "rank" in name or "rows" in name
    # The control: another run's losses.
    other = two["qwen3_vl, a mean over each micro-batch, padded"]
    assert "qwen3_vl" in name or differing(padded, other, times=CONTROL)


def test_a_row_without_an_image_is_refused_where_weights_are_in_parts(two):
    assert "row 3 of the train dataset has no image (its column 'images' is [])" in two["refused"]
    assert "a rank whose micro-batch has no image would not" in two["refused"]
