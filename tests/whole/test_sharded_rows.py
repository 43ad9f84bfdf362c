"""Rows that processes share, in real processes on a CPU (gloo): losses, gradient norms and weights of one process."""

import distributed_run
import pytest
from launches import launch_whole
from selection import IN_FULL, LAUNCHES, chosen
from test_distributed import COMPILED, FSDP2, SCRIPT, alone, merged
from tolerance import assert_another_run, assert_rounding, assert_trajectory, assert_weights

pytestmark = list(LAUNCHES)

# In full this is what the page about long rows tells of: 20 steps, and every model on four processes.
LONG = {"lora": False, "max_steps": 20 if IN_FULL else 6}
RUNS = {f"{kind} {strategy}": {"builds": kind, "strategy": strategy, **LONG}
        for kind in distributed_run.SHARED for strategy in ("step", "bfd")}  # fmt: skip
RUNS = chosen(RUNS, "llama step", "qwen3 bfd", "gemma2 step", "gpt_oss bfd")
ON_FOUR = RUNS if IN_FULL else ["llama step", "gpt_oss bfd"]
BY_STEPS, BY_ROWS = ({name: RUNS[name] for name in ON_FOUR if name.endswith(kind)} for kind in ("step", "bfd"))
EXPERTS = {"gpt_oss bfd": RUNS["gpt_oss bfd"]}
MORE = {
    "LoRA": {"builds": "llama"},
    "checkpointing": {"builds": "llama", "gradient_checkpointing": True},
    # Not with LoRA, of which DDP takes no reentrant checkpoints, shared rows or not.
    "reentrant": {"builds": "llama", "lora": False, "gradient_checkpointing": True,
                  "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "by example": {"builds": "llama", "strategy": "minibatch", "loss_weighting": "example", "loss_by": "source"},
    "means": {"builds": "llama", "average_tokens_across_devices": False},
    "compiled": {"builds": "llama", **COMPILED},
}  # fmt: skip
MORE = chosen(MORE, "reentrant", "by example", "means", "compiled")
FULL = {"lora": False}
RESUMED = {**FULL, "max_steps": 6}
# Each part shifts its own labels; each part attends to itself; each process takes its own loss's gradient.
FAULTS = {f"fault: {name}": {**FULL, "fault": name, "check_packing": False} for name in ("labels", "layout")}
FAULTS = chosen(FAULTS, "fault: labels")
CAUGHT = {f"caught: {name}": {**FULL, "fault": name} for name in ("layout", "gradients")}


def shared(scenarios, processes=2):
    return {name: {**options, "sequence_parallel": processes} for name, options in scenarios.items()}


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder, {**RUNS, **MORE, "full": FULL, "resume": RESUMED})


def start(processes, folder, scenarios):
    return launch_whole(SCRIPT, folder, scenarios, processes=processes)


@pytest.fixture(scope="module")
def two(folder, one):
    resumed = {"resume": {**RESUMED, "resume": str(folder / "one" / "resume" / "checkpoint-2")}}
    alike = {**RUNS, **MORE, **FAULTS, **CAUGHT, **resumed, "FSDP2": {**FULL, **FSDP2}}
    whole = {f"whole rows, {name}": options for name, options in {"means": MORE["means"], **EXPERTS}.items()}
    return start(2, folder / "two", {**shared(alike), **whole, "evaluated": {**FULL, "evaluate": 11}})


@pytest.fixture(scope="module")
def four(folder, two):
    """Four that share rows, and two groups of two."""
    resumed = {"resume": {**RESUMED, "resume": str(folder / "two" / "resume" / "checkpoint-4")}}
    pairs = {"FSDP2": {**FULL, **FSDP2}, "evaluated": {**FULL, "evaluate": 11}, **resumed, "means": MORE["means"]}
    groups = {f"groups, {name}": options for name, options in shared({**BY_ROWS, **pairs}).items()}
    return start(4, folder / "four", {**groups, **shared(BY_STEPS, 4)})


def assert_same(result, expected):
    assert_trajectory(result["losses"], expected["losses"])
    assert_trajectory(result["norms"], expected["norms"])
    assert result["tokens"] == expected["tokens"]
    assert result["verdict"] == "exact"
    assert_rounding(result["sharded_row"])
    assert result["flos"] == pytest.approx(expected["flos"])


@pytest.mark.parametrize("name", [*RUNS, *MORE])
def test_two_processes_share_rows(one, two, name):
    assert_same(two[name], one[name])


@pytest.mark.parametrize("name", BY_STEPS)
def test_four_processes_share_rows(one, four, name):
    assert_same(four[name], one[name])


@pytest.mark.parametrize("name", BY_ROWS)
def test_two_groups_of_two_share_rows(one, two, four, name):
    """The routers' loss of two processes is another one than that of one, as it is no sum over tokens."""
    assert_same(four[f"groups, {name}"], two[f"whole rows, {name}"] if name in EXPERTS else one[name])


@pytest.mark.parametrize("processes", ["two", "four"])
def test_weights_are_sharded_by_fsdp2_as_well(folder, one, two, four, processes):
    name = {"two": "FSDP2", "four": "groups, FSDP2"}[processes]
    result = {"two": two, "four": four}[processes][name]
    assert_same(result, one["full"])
    assert result["engine"] == "FSDP" and "FSDP" in result["wrapped"][1]
    saved, reference = folder / processes / name / "saved", folder / "one" / "full" / "saved"
    assert_weights(merged(saved, lora=False), merged(reference, lora=False), steps=len(result["losses"]))


def test_a_run_resumes_with_another_sequence_parallel(one, two, four):
    """From one process to two that share rows, and from these to two groups of two: the same tokens in every step."""
    for result in (two["resume"], four["groups, resume"]):
        assert_trajectory(result["losses"], one["resume"]["losses"])
        assert result["tokens"] == one["resume"]["tokens"]


def test_the_mean_of_each_ranks_loss_is_the_groups(four, two):
    """`average_tokens_across_devices=False`: with two groups it is the mean of two losses, as of two processes."""
    assert_trajectory(four["groups, means"]["losses"], two["whole rows, means"]["losses"])


def test_groups_evaluate_as_processes(two, four):
    """Eleven documents in batches of four: the last batch repeats some."""
    assert_trajectory([four["groups, evaluated"]["eval"]], [two["evaluated"]["eval"]])


@pytest.mark.parametrize("name", FAULTS)
def test_rows_that_are_shared_wrongly_train_otherwise(one, two, name):
    assert_another_run(two[name]["losses"], one["full"]["losses"])


@pytest.mark.parametrize("name", CAUGHT)
def test_the_check_finds_rows_that_are_shared_wrongly(two, name):
    """On every process, before the first step."""
    assert len(two[name]) == 2
    for error in two[name]:
        assert "rows that 2 processes share are not exact on this model" in error and "at step 0" in error
