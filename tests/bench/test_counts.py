"""A regression benchmark in counts, which no machine's mood moves: operations, arithmetic, memory, waits of one step.
Counts may fall freely; one that rises above its bound in counts.json fails. After an improvement,
`tests/shared/counted.py` tightens the bounds."""

import json

import counted
import pytest
import torch
from attention_speed import TRANSFORMERS
from operations import OperationCounter

BOUNDS = json.loads(counted.BOUNDS.read_text())["cases"]
# Releases of torch and transformers move a few small operations; a mask or a second forward is far more.
SLACK = {"calls": 1.05, "allocated_bytes": 1.05, "largest_bytes": 1.05}


def exceeded(counts, bounds):
    return [f"{n}: {counts[n]:,} > {b:,}" for n, b in bounds.items() if counts[n] > b * SLACK.get(n, 1.0)]


def test_the_bounds_are_those_of_the_cases():
    assert set(BOUNDS) == {f"step/{s}" for s in counted.STRATEGIES} | {f"attention/{b}" for b in counted.BACKENDS}


@pytest.mark.parametrize("strategy", counted.STRATEGIES)
def test_a_packed_step_stays_within_its_bounds(strategy):
    counts = counted.count_step(**counted.options(strategy))
    assert not exceeded(counts, BOUNDS[f"step/{strategy}"])
    assert counts["recompiles"] == 0


@pytest.mark.parametrize("backend", counted.BACKENDS)
def test_an_attention_stays_within_its_bounds(backend):
    counts = counted.count_attention(backend)
    assert not exceeded(counts, BOUNDS[f"attention/{backend}"])
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
