"""DeepSpeed ZeRO-3 on a CPU (gloo), two processes under torchrun, every weight in parts: losses and weights of one
process without DeepSpeed, and the exactness check on the engine."""

import os
from importlib.util import find_spec

import pytest
from test_distributed import LONG, alone, assert_same, launch
from tolerance import assert_trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

RUNS = {
    "step, LoRA": {},
    "minibatch, LoRA": {"strategy": "minibatch"},
    "step, full": {"lora": False},
    "minibatch, full": {"strategy": "minibatch", "lora": False},
}
CHECKPOINTED = {"gradient_checkpointing": True}
LEAKS = {"leak": [1, "forward"], "gradients": [1, "backward"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zero3")


@pytest.fixture(scope="module")
def one(folder):
    """The same runs in this process."""
    return alone(folder, {**RUNS, "resume": LONG, "evaluate": {"evaluate": True}})


@pytest.fixture(scope="module")
def two(folder, one):
    """Runs under ZeRO-3, one of them resumed from its second step."""
    base, resumed = str(folder / "base"), str(folder / "two" / "resume" / "checkpoint-2")
    scenarios = {
        **RUNS,
        "by name": {"lora": False, "base": base},
        "checkpointed, LoRA": CHECKPOINTED,
        "checkpointed, full": {"lora": False, **CHECKPOINTED},
        "evaluate": {"evaluate": True},
        "resume": LONG,
        "resumed": {**LONG, "resume": resumed},
        **{name: {"leak": leak} for name, leak in LEAKS.items()},
    }
    port = str(31_500 + os.getpid() % 1000)
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    scenarios = {name: {"zero3": True, **options} for name, options in scenarios.items()}
    results, done = launch(launcher, folder / "two", scenarios, environment={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    return results


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        **{name: name for name in RUNS},
        "by name": "step, full",
        "checkpointed, LoRA": "step, LoRA",
        "checkpointed, full": "step, full",
        "resume": "resume",
    }.items(),
)
def test_two_processes_train_as_one(folder, one, two, name, expected):
    result, lora = two[name], RUNS.get(expected, {}).get("lora", True)
    saved, reference = folder / "two" / name / "saved", folder / "one" / expected / "saved"
    assert_same(result, one[expected], saved, reference, lora=lora)
    assert result["engine"] == "DEEPSPEED" and result["wrapped"][0] == "DeepSpeedEngine"


def test_a_resumed_run_ends_as_the_undisturbed_one(one, two):
    assert_trajectory(two["resumed"]["losses"], one["resume"]["losses"])
    assert two["resumed"]["verdict"] == "exact"


def test_evaluation_needs_no_training_before(one, two):
    assert_trajectory([two["evaluate"]["eval"]], [one["evaluate"]["eval"]])


@pytest.mark.parametrize(("name", "found"), [("leak", "leak: "), ("gradients", "gradient")])
def test_all_ranks_refuse_what_one_rank_finds(two, name, found):
    """The negative controls: on rank 1, documents that see each other, and gradients that packing changes."""
    messages = two[name]
    assert messages[0] == messages[1]
    assert "rank 1 of 2: packing is not exact on this model" in messages[0] and found in messages[0]
    assert messages[0].endswith("at step 0")
