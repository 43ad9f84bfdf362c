"""Processes killed in the forward, in the optimizer step, while a checkpoint is written, before it is marked as whole,
while a plan is made; ranks that stop answering. The rest ends in time, and the run resumes to the same bits. Two
ranks, and one process with streams and loader workers. Four points of two ranks by default; `KILL_POINTS=50` runs as
many as `benchmarks/README.md` tells of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kill_run
import pytest
from test_distributed import FSDP2

SCRIPT = Path(__file__).parents[1] / "shared" / "kill_run.py"

COUNT = int(os.environ.get("KILL_POINTS", "4"))


@pytest.fixture(scope="module")
def outcomes(folder):
    """In a process of its own, which forks: this one may have threads."""
    command = [sys.executable, str(SCRIPT), str(folder), str(COUNT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600 + 60 * COUNT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_point_was_hit_and_nothing_hangs(outcomes):
    for point in outcomes:
        assert point["died"], json.dumps(point)
        # None is a rank that the parent had to end: one that was stopped, never one that waits.
        stopped = point["victims"] if point["phase"] == "stopped" else []
        others = [code for rank, code in enumerate(point["exits"]) if rank not in stopped]
        assert 0 not in others and None not in others, json.dumps(point)
        assert point["seconds"] < kill_run.STOPPED + kill_run.GRACE, json.dumps(point)


@pytest.mark.slow
def test_every_run_resumes_to_the_same_bits(outcomes):
    for point in outcomes:
        assert set(point["resumed"]) == {0} and point["same"], json.dumps(point)


@pytest.mark.slow
def test_no_half_written_checkpoint_is_used(outcomes):
    for point in outcomes:
        whole, found = point["resumed_from"], point["checkpoints"]
        assert point["passed_over"] == len([name for name in found if whole and name > whole]), json.dumps(point)
        if point["phase"] in ("writing", "marking"):
            assert found and whole != max(found), json.dumps(point)


def test_points_are_spread_over_runs_ranks_and_phases():
    points = kill_run.draw(50, 0)
    assert {point["run"] for point in points} == set(kill_run.RUNS)
    assert {point["phase"] for point in points} == set(kill_run.PHASES)
    assert {tuple(point["victims"]) for point in points} == {(0,), (1,), (0, 1)}
    assert kill_run.RUNS["fsdp2 step"]["fsdp"] == FSDP2["fsdp"] and points == kill_run.draw(50, 0)
