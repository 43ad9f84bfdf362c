"""A regression benchmark in counts, which no machine's mood moves: operations, arithmetic, memory, waits of one step.
With the versions that counts.json names, counts are held exactly: a change changes the table, by
`tests/shared/counted.py`. With others, one that rises above its bound fails."""

import json

import counted
import pytest
import torch
from attention_speed import TRANSFORMERS
from gpu import counting, model
from operations import OperationCounter
from torch._subclasses import FakeTensorMode

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


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    """Half of the rate of either; a kernel that is one operator adds up what it moves, and temporaries are no peak."""
    recorder = counting.Recorder([4])
    with FakeTensorMode():
        a, b = torch.empty(8, 128), torch.empty(128, 128)
        recorder.follow((a, b))
        before = recorder.live
        with recorder:
            out = a @ b
            one = recorder.as_one(lambda x: (x * 2 + 3).sum(), lambda args, result: args)
            one(out)
            moved = lambda args, result: [args, result]  # noqa: E731
            recorder.as_one(lambda x: x, moved, "dropout", lambda x: 2e9)(out)
            view = out.view(-1)
    product, fused, drawn, added = recorder.counted.operators
    figures = (product.kind, product.flops, product.bytes)
    assert figures == ("adapter product", 2 * 8 * 128 * 128, 4 * (1024 + 128**2 + 1024))
    assert (fused.kind, fused.flops, fused.bytes) == ("fused", 0.0, 4 * 1024)
    assert (drawn.kind, drawn.flops, drawn.bytes, added.flops, added.bytes) == ("dropout", 2e9, 4096, 0.0, 4096)
    rates = {"products": product.flops / 3, "bandwidth": product.bytes / 2, "attention": (1.0, 1.0), "integers": 1e9}
    device = counting.Device("x", **rates)
    assert drawn.seconds(device) == 2.0
    assert product.seconds(device) == 3.0 and fused.seconds(device) == 4096 * 2 / product.bytes
    assert recorder.counted.peak_bytes == before + 4096 + 512
    del out, view
    assert recorder.live == before
