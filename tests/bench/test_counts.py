"""A regression benchmark in counts, which no machine's mood moves: operations, arithmetic, memory, waits of one step.
With the versions that counts.json names, counts are held exactly: a change changes the table, by
`tests/shared/counted.py`. With others, one that rises above its bound fails."""

import json

import counted
import pytest
import torch
from attention_speed import TRANSFORMERS
from gpu import model
from operations import OperationCounter

TABLE = json.loads(counted.BOUNDS.read_text())
BOUNDS = TABLE["cases"]
OTHERS = {name: number for name, number in counted.versions().items() if TABLE["versions"][name] != number}
# Releases of torch and transformers move a few small operations; a mask or a second forward is far more.
SLACK = {"calls": 1.05, "allocated_bytes": 1.05, "largest_bytes": 1.05}
exactly = pytest.mark.skipif(bool(OTHERS), reason=f"the counts are those of {TABLE['versions']}, here are {OTHERS}")


def exceeded(counts, bounds):
    return [f"{n}: {counts[n]:,} > {b:,}" for n, b in bounds.items() if counts[n] > b * SLACK.get(n, 1.0)]


def assert_counts(counts, name):
    """Equal to the table, or with other versions no more."""
    if OTHERS:
        assert not exceeded(counts, BOUNDS[name])
    else:
        assert counts == BOUNDS[name]


def test_the_bounds_are_those_of_the_cases():
    small = {*(f"step/{s}" for s in counted.STRATEGIES), *(f"attention/{b}" for b in counted.BACKENDS)}
    assert set(BOUNDS) == {*small, counted.LAYERS, *(f"device/{name}" for name in counted.DEVICE)}


@exactly
def test_an_optimizer_step_runs_these_operations_in_layers_and_outside():
    assert counted.count_layers() == BOUNDS[counted.LAYERS]


@exactly
@pytest.mark.parametrize("name", counted.DEVICE)
def test_a_micro_batch_on_a_gpu_runs_these_operators_and_takes_this_memory(name):
    assert counted.count_device(name) == BOUNDS[f"device/{name}"]


@exactly
def test_one_more_operator_in_a_layer_is_seen(monkeypatch):
    """The control: the result of each layer is multiplied once, forward and backward."""
    build = model.build

    def with_hooks(setting, fakes):
        built = build(setting, fakes)
        for layer in built.get_base_model().model.layers:
            layer.register_forward_hook(lambda module, args, out: out * 1.0)
        return built

    monkeypatch.setattr(model, "build", with_hooks)
    counts, bounds = counted.count_device("lora"), BOUNDS["device/lora"]
    assert counts["operators_per_layer"] == bounds["operators_per_layer"] + 2
    assert counts["operators_outside"] == bounds["operators_outside"]


@pytest.mark.parametrize("strategy", counted.STRATEGIES)
def test_a_packed_step_stays_within_its_bounds(strategy):
    counts = counted.count_step(**counted.options(strategy))
    assert_counts(counts, f"step/{strategy}")
    assert counts["recompiles"] == 0


@pytest.mark.parametrize("backend", counted.BACKENDS)
def test_an_attention_stays_within_its_bounds(backend):
    counts = counted.count_attention(backend)
    assert_counts(counts, f"attention/{backend}")
    assert (counts["host_syncs"], counts["recompiles"]) == (0, 0)


def test_a_step_with_a_dense_mask_exceeds_the_bounds():
    """The control: TRL's own trainer on the same documents, padding-free, unpatched."""
    counts = counted.count_step(padding_free=True, max_length=None)
    assert "flops" in {line.split(":")[0] for line in exceeded(counts, BOUNDS["step/minibatch"])}


def test_an_attention_with_a_dense_mask_exceeds_the_bounds():
    above = exceeded(counted.count_attention(TRANSFORMERS), BOUNDS["attention/sdpa"])
    assert {line.split(":")[0] for line in above} >= {"flops", "allocated_bytes", "largest_bytes"}


def test_the_counter_counts():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with OperationCounter() as counter:
        (a @ b).view(21).sum().item()
    assert counter.to_dict() == {
        "flops": 2 * 3 * 5 * 7, "calls": 4, "allocated_bytes": 4 * 21 + 4, "largest_bytes": 4 * 21, "host_syncs": 1,
        "recompiles": 0,
    }  # fmt: skip
