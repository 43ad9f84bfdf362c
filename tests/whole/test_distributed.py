"""Real processes on a CPU (gloo), under torchrun and accelerate: losses and weights of one process with the same
global batch, wrapped in DDP and in FSDP2."""

import distributed_run
import pytest
from launches import free_port, launch, launch_whole
from peft import PeftModel
from selection import LAUNCHES, chosen
from tolerance import BFLOAT16_ADAPTERS, assert_another_run, assert_trajectory, assert_weights, differs
from transformers import AutoModelForCausalLM

pytestmark = list(LAUNCHES)

SCRIPT = "distributed_run.py"
FSDP2 = {"fsdp": {"version": 2}}
RUNS = {
    "step, LoRA": {},
    "step, full": {"lora": False},
    "minibatch, LoRA": {"strategy": "minibatch"},
    "bfd, full": {"strategy": "bfd", "lora": False},
    "patched first": {"patch_first": True},
    # Ranks run them another number of times; FSDP2 gathers each whole, as transformers names them to it.
    "stateful mixers": {"builds": "mamba", "lora": False},
}
# Against TRL's own padded run: a loss that is no sum over tokens is another one under another number of processes.
LIKE_TRL = {
    # Padded micro-batches are spread over both ranks, and their auxiliary loss is most of the gradient.
    # SGD: others divide by the gradient's size, and rounding with it.
    "experts": {"builds": "experts", "lora": False, "router_aux_loss_coef": 10.0, "pad_to_multiple_of": 16,
                "optim": "sgd", "learning_rate": 0.05},
    "means by rank": {"average_tokens_across_devices": False},
}  # fmt: skip
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
LONG = {"max_steps": 6}
ALIKE = chosen(
    {**{f"DDP {name}": options for name, options in RUNS.items()},
     **{f"FSDP2 {name}": {**options, **FSDP2} for name, options in RUNS.items()}},
    "DDP step, LoRA", "DDP minibatch, LoRA", "DDP bfd, full", "DDP patched first", "FSDP2 step, full",
    "FSDP2 stateful mixers",
)  # fmt: skip
PARTIAL = chosen({strategy: strategy for strategy in ("step", "minibatch", "bfd")}, "step", "bfd")
TWO = {
    **ALIKE,
    **{f"DDP {name}": options for name, options in LIKE_TRL.items()},
    **{f"DDP {name}, padded": {**options, "padded": True} for name, options in LIKE_TRL.items()},
    "FSDP2 experts": {**LIKE_TRL["experts"], **FSDP2},
    "DDP compiled": COMPILED,
    "FSDP2 compiled": {**COMPILED, **FSDP2},
    "DDP wrapped": {"wrap": "DDP"},
    "FSDP2 wrapped": {"wrap": "FSDP2"},
    "DDP leak": {"leak": 1},
    "FSDP2 leak": {"leak": 1, **FSDP2},
    "resume": LONG,
    # 13 documents for 2 ranks of 4: the last step has fewer, and accelerate repeats some.
    **{f"DDP partial {strategy}": {"strategy": strategy, "documents": 13, "max_steps": -1, "num_train_epochs": 1}
       for strategy in PARTIAL},
}  # fmt: skip
# A 4-bit model, by how it is wrapped and how its codes are kept: those in bytes stay whole on every rank.
NF4 = {"DDP": ({}, "uint8"), "FSDP2, whole": (FSDP2, "uint8"), "FSDP2, sharded": (FSDP2, "float32")}
NF4 = chosen(NF4, "DDP", "FSDP2, sharded")
FOUR = {
    "DDP step, LoRA": {},
    "FSDP2 step, full": {"lora": False, **FSDP2},
    "resume": {**LONG, "resume": "checkpoint-2"},
}


def alone(folder, scenarios):
    """What came of each scenario in this process; the model that they begin with lies in `base`."""
    distributed_run.model().save_pretrained(folder / "base")
    return {name: distributed_run.run(str(folder / "one" / name), **options) for name, options in scenarios.items()}


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder, {**RUNS, "resume": LONG, "NF4": {"nf4": (str(folder / "base"), "uint8")}})


@pytest.fixture(scope="module")
def two(folder, one):
    base = str(folder / "base")
    nf4 = {f"NF4 {name}": {**engine, "nf4": (base, storage)} for name, (engine, storage) in NF4.items()}
    return launch_whole(SCRIPT, folder / "two", {**TWO, **nf4})


@pytest.fixture(scope="module")
def four(folder, two):
    """Resumed from what two processes wrote; at the end rank 1 is killed."""
    scenarios = {**FOUR, "resume": {**FOUR["resume"], "resume": str(folder / "two" / "resume" / "checkpoint-2")}}
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "4", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()]
    return launch(SCRIPT, launcher, folder / "four", scenarios, "1")


def merged(folder, *, lora, build=distributed_run.model):
    if not lora:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return PeftModel.from_pretrained(build(), folder).merge_and_unload().state_dict()


def assert_same(result, expected, saved, reference, *, lora):
    assert_trajectory(result["losses"], expected["losses"])
    assert result["tokens"] == expected["tokens"]
    assert result["verdict"] == "exact"
    assert_weights(merged(saved, lora=lora), merged(reference, lora=lora), steps=len(result["losses"]))


@pytest.mark.parametrize("run", ALIKE)
def test_two_processes_train_as_one(folder, one, two, run):
    engine, name = run.split(" ", 1)
    result, lora = two[run], RUNS[name].get("lora", True)
    assert_same(result, one[name], folder / "two" / run / "saved", folder / "one" / name / "saved", lora=lora)
    assert result["engine"] == {"DDP": "MULTI_CPU", "FSDP2": "FSDP"}[engine]
    assert ("FSDP" in result["wrapped"][1]) == (engine == "FSDP2")


@pytest.mark.parametrize("name", ["DDP experts", "FSDP2 experts", "DDP means by rank"])
def test_two_processes_train_as_trls_two_do(folder, two, name):
    """A single process, whose padded micro-batches are others, does not: the control."""
    of, lora = name.split(" ", 1)[1], "experts" not in name
    padded = f"DDP {of}, padded"
    assert_trajectory(two[name]["losses"], two[padded]["losses"])
    build = distributed_run.model if lora else distributed_run.experts
    weights = [merged(folder / "two" / run / "saved", lora=lora, build=build) for run in (name, padded)]
    assert_weights(*weights, steps=len(two[name]["losses"]))
    control = distributed_run.run(str(folder / "one" / of), **LIKE_TRL[of])
    assert_another_run(control["losses"], two[padded]["losses"])


@pytest.mark.parametrize("name", ["DDP step, LoRA", "FSDP2 step, full"])
def test_four_processes_train_as_one(folder, one, four, name):
    same = name.split(" ", 1)[1]
    saved, reference = folder / "four" / name / "saved", folder / "one" / same / "saved"
    assert_same(four[0][name], one[same], saved, reference, lora=same.endswith("LoRA"))


@pytest.mark.parametrize("strategy", PARTIAL)
def test_the_tokens_of_every_rank_count_in_the_last_step_too(two, strategy):
    result = two[f"DDP partial {strategy}"]
    assert result["tokens"][-1] == result["trained"]


def test_trained_weights_are_told_from_others(folder, one):
    """The control: another strategy, and no training, are not the same."""
    trained = merged(folder / "one" / "step, full" / "saved", lora=False)
    for other in (merged(folder / "one" / "bfd, full" / "saved", lora=False), distributed_run.model().state_dict()):
        assert any(differs(trained[name], other[name]) for name in trained)


@pytest.mark.parametrize("name", NF4)
def test_two_processes_train_a_4bit_model_as_one(one, two, name):
    """TRL keeps the adapters of a 4-bit model in bfloat16, whose rounding shows."""
    result = two[f"NF4 {name}"]
    assert_trajectory(result["losses"], one["NF4"]["losses"], places=BFLOAT16_ADAPTERS)
    assert result["verdict"] == "exact"
    if NF4[name][1] == "uint8":
        assert result["losses"] == two["NF4 DDP"]["losses"]


# One for each kind of call; under FSDP2 a third: its hooks hand on new tensors, whose sizes are taken for fixed.
GRAPHS = {"DDP": 2, "FSDP2": 3}


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_two_processes_train_a_compiled_model_as_one(folder, one, two, engine):
    """By layer: the first layer's input needs no gradient, which is a graph of its own."""
    result, name = two[f"{engine} compiled"], "step, LoRA"
    saved, reference = folder / "two" / f"{engine} compiled" / "saved", folder / "one" / name / "saved"
    assert_same(result, one[name], saved, reference, lora=True)
    assert result["graphs"] == GRAPHS[engine]


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_wrapped_model_can_be_patched_and_checked(two, engine):
    assert two[f"{engine} wrapped"] == ["exact", "exact"]


def assert_refused_by_all(messages, *found):
    assert messages[0] == messages[1] and messages[0].endswith("at step 0")
    assert "rank 1 of 2: packing is not exact on this model: " in messages[0]
    assert all(words in messages[0] for words in found)


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_all_ranks_refuse_what_one_rank_finds(two, engine):
    assert_refused_by_all(two[f"{engine} leak"], "leak: ", "layers.1.self_attn")


def test_another_number_of_processes_resumes_with_the_same_examples(folder, one, four):
    """Two processes up to step 2, four up to step 4, one to the end."""
    newest = str(folder / "four" / "resume" / "checkpoint-4")
    result = distributed_run.run(str(folder / "again"), resume=newest, **LONG)
    assert_same(result, one["resume"], folder / "again" / "saved", folder / "one" / "resume" / "saved", lora=True)


def test_the_launcher_names_the_rank_that_was_killed(four):
    done = four[1]
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr and "rank      : 1 " in done.stderr
