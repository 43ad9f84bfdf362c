"""Two real processes on a CPU (gloo): the same losses as one process with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerance import assert_trajectory

SCRIPT = Path(__file__).parent / "distributed_run.py"


def run(launcher, strategy, out, *resume):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), strategy, str(out), *resume]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(next(line for line in reversed(result.stdout.splitlines()) if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["step", "minibatch", "bfd"])
def test_two_processes_train_as_one(tmp_path, strategy):
    one = run([], strategy, tmp_path / "one")
    port = str(29_500 + os.getpid() % 1000)
    two = run(
        ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port], strategy, tmp_path / "two"
    )
    assert one["verdict"] == two["verdict"] == "exact"
    assert_trajectory(two["losses"], one["losses"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["step", "bfd"])
def test_another_number_of_processes_resumes_with_the_same_examples(tmp_path, strategy):
    """Two processes up to step 3, one from there, with the same examples in every step."""
    port = str(30_500 + os.getpid() % 1000)
    whole = run(["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port], strategy, tmp_path)
    resumed = run([], strategy, tmp_path, "resume")
    assert_trajectory(resumed["losses"], whole["losses"])
