"""Long runs in short form: nothing grows, no step waits for a plan. `SOAK_STEPS=20000` runs the long form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import exhaustive

STEPS = int(os.environ.get("SOAK_STEPS", "600"))
# Over 20,000 steps; a short run's first samples are still warming up, and a page more or less counts there.
MEMORY_GROWTH = 0.02 if STEPS >= 20_000 else 0.04


def soak(*options):
    """The figures of one run in a process of its own, and the lines that it wrote."""
    command = [sys.executable, str(Path(__file__).parents[1] / "shared" / "soak.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]), len(lines) + len(done.stderr.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("data", "strategy"), [("map", "step"), *exhaustive(("stream", "step"), ("map", "bfd"))])
def test_a_long_run_grows_in_no_resource(data, strategy):
    figures, lines = soak("--steps", str(STEPS), "--data", data, "--strategy", strategy)
    assert figures["memory_growth"] <= MEMORY_GROWTH, figures
    assert figures["files"][1] <= figures["files"][0] and figures["threads"][1] <= figures["threads"][0], figures
    assert figures["log_lines"][1] <= figures["log_lines"][0], figures
    assert lines < 120, "lines for twenty logs and what starts and ends a run"
    early, late = figures["median_step_ms"]
    assert late < 3 * early and figures["slowest_step_ms"] < 2000, figures
