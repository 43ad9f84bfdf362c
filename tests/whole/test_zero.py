"""DeepSpeed on a CPU (gloo), two processes under torchrun, in ZeRO-3 every weight in parts: losses and weights of one
process without DeepSpeed, also where the processes share rows, and the check on the engine."""

from importlib.util import find_spec

import pytest
from launches import launch_whole
from selection import IN_FULL, LAUNCHES, chosen
from test_distributed import LONG, SCRIPT, alone, assert_refused_by_all, assert_same
from tolerance import assert_rounding, assert_trajectory

pytestmark = [*LAUNCHES, pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]

CHECKPOINTED = {"gradient_checkpointing": True}
RUNS = {
    "step, LoRA": {},
    "minibatch, LoRA": {"strategy": "minibatch"},
    "step, full": {"lora": False},
    "minibatch, full": {"strategy": "minibatch", "lora": False},
}
BY_NAME = {"step, full, by name": {"lora": False}}
MORE = {"step, LoRA, checkpointed": CHECKPOINTED, "step, full, checkpointed": {"lora": False, **CHECKPOINTED}}
ZERO3 = chosen({**RUNS, **MORE, **BY_NAME}, "step, LoRA, checkpointed")
LEAKS = {"leak": [1, "forward"], "gradients": [1, "backward"]}
STAGES = {
    "step, LoRA, ZeRO-1": {"zero": 1},
    "step, full, ZeRO-2": {"zero": 2, "lora": False},
    "minibatch, full, ZeRO-2": {"zero": 2, "strategy": "minibatch", "lora": False},
}
STAGES = chosen(STAGES, "minibatch, full, ZeRO-2")
# Rows that the two processes share. They also resume from a run whose processes have rows of their own.
LLAMA, LLAMA_LORA = {"builds": "llama", "lora": False, **LONG}, {"builds": "llama"}
SHARED = {
    "shared, ZeRO-2": {**LLAMA, "zero": 2},
    "shared, ZeRO-3": {**LLAMA, "zero": 3},
    "shared, ZeRO-3, checkpointed": {**LLAMA, "zero": 3, **CHECKPOINTED},
    "shared, ZeRO-3, LoRA": {**LLAMA_LORA, "zero": 3},
}
SHARED = chosen(SHARED, "shared, ZeRO-3")
FAULTS = {f"shared, {fault}": {**LLAMA, "zero": 3, "fault": fault} for fault in ("layout", "gradients")}
FAULTS = chosen(FAULTS, "shared, gradients")


def same_run(name):
    """Return the name of the run of one process that has the same losses: "step, full" of "step, full, ZeRO-2"."""
    return ", ".join(name.split(", ")[:2])


@pytest.fixture(scope="module")
def one(folder):
    expected = {same_run(name) for name in (*ZERO3, *STAGES)}
    runs = {name: options for name, options in RUNS.items() if name in expected}
    runs |= {"llama": LLAMA, **({"llama, LoRA": LLAMA_LORA} if IN_FULL else {})}
    return alone(folder, {**runs, "evaluate": {"evaluate": True}})


@pytest.fixture(scope="module")
def two(folder, one):
    """Runs under DeepSpeed, two of them resumed from the second step of another."""
    base, resumed = str(folder / "base"), str(folder / "two" / "long" / "checkpoint-2")
    scenarios = {
        **ZERO3,
        "evaluate": {"evaluate": True},
        "long": LLAMA,
        "resumed": {**LLAMA, "resume": resumed},
        **{name: {"leak": leak, "lora": False} for name, leak in LEAKS.items()},
    }
    for name in scenarios.keys() & BY_NAME:
        scenarios[name] = {**scenarios[name], "base": base}
    scenarios = {name: {"zero": 3, **options} for name, options in {**scenarios, **STAGES}.items()}
    shared = {**SHARED, **FAULTS, "shared, resumed": {**LLAMA, "zero": 3, "resume": resumed}}
    scenarios |= {name: {**options, "sequence_parallel": 2} for name, options in shared.items()}
    return launch_whole(SCRIPT, folder / "two", scenarios, environment={"DS_ACCELERATOR": "cpu"})


@pytest.mark.parametrize("name", [*ZERO3, *STAGES])
def test_two_processes_train_as_one(folder, one, two, name):
    """In ZeRO-1 and ZeRO-2 the check runs before DeepSpeed wraps the model, and the first batch on its engine."""
    expected = same_run(name)
    saved, reference = folder / "two" / name / "saved", folder / "one" / expected / "saved"
    assert_same(two[name], one[expected], saved, reference, lora="LoRA" in name)
    assert two[name]["engine"] == "DEEPSPEED" and two[name]["wrapped"][0] == "DeepSpeedEngine"


@pytest.mark.parametrize("name", ["resumed", "shared, resumed"])
def test_a_resumed_run_ends_as_the_undisturbed_one(one, two, name):
    """Also from two processes with rows of their own to two that share them."""
    for result in (two["long"], two[name]):
        assert_trajectory(result["losses"], one["llama"]["losses"])
        assert result["tokens"] == one["llama"]["tokens"] and result["verdict"] == "exact"


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_share_rows(one, two, name):
    expected = one["llama, LoRA" if "LoRA" in name else "llama"]
    assert_trajectory(two[name]["losses"], expected["losses"])
    assert two[name]["tokens"] == expected["tokens"]
    assert two[name]["verdict"] == "exact"
    assert_rounding(two[name]["sharded_row"])
    assert two[name]["engine"] == "DEEPSPEED"


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_finds_rows_that_are_shared_wrongly(two, name):
    for error in two[name]:
        assert "rows that 2 processes share are not exact on this model" in error and "at step 0" in error


def test_evaluation_needs_no_training_before(one, two):
    assert_trajectory([two["evaluate"]["eval"]], [one["evaluate"]["eval"]])


@pytest.mark.parametrize(("name", "found"), [("leak", "leak: "), ("gradients", "gradient")])
def test_all_ranks_refuse_what_one_rank_finds(two, name, found):
    """The negative controls: on rank 1, documents that see each other, and gradients that packing changes."""
    assert_refused_by_all(two[name], found)
