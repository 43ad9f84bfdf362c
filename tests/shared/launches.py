"""Tests of several processes: the launch of a script, and the script's side of it. A script gets a folder and its
scenarios as JSON, `{name: arguments of its run}`. It runs them one after the other in one process group, and prints
what came of each as one line of JSON."""

import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from accelerate.state import PartialState

SHARED = Path(__file__).parent
_PORTS = itertools.count(29_500 + os.getpid() % 1000, 1000)


def free_port():
    """Return a port that no other launch takes, of this test process or of another."""
    return str(next(_PORTS))


def torchrun(processes):
    return ["torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", free_port()]


def launch(script, launcher, folder, scenarios, *more, environment=None):
    """Return what came of each scenario, and how the launcher ended."""
    # MKL rounds by where a tensor lies in memory, which engines choose; seen with AVX512.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", **(environment or {})}
    command = [sys.executable, "-m", *launcher, str(SHARED / script), str(folder), json.dumps(scenarios), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    results = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert results, done.stderr[-8000:]
    return json.loads(results[-1]), done


def launch_whole(script, folder, scenarios, *, processes=2, environment=None):
    """Return what came of each scenario on so many processes, which must end well."""
    results, done = launch(script, torchrun(processes), folder, scenarios, environment=environment)
    assert done.returncode == 0, done.stderr[-8000:]
    return results


def run_scenarios(run, *, before_the_end=lambda rank: None):
    """Run the scenarios of the command line with `run(folder, **arguments)`, and print what came of them.
    `before_the_end` is called with the rank once the results are printed."""
    folder, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
    results = {name: run(str(folder / name), **scenario) for name, scenario in scenarios.items()}
    state = PartialState()
    if state.is_main_process:
        print(json.dumps(results), flush=True)
    state.wait_for_everyone()  # the launcher ends the others with one that dies, before they have said it
    before_the_end(state.process_index)
    state.wait_for_everyone()
    # The group's threads must not outlive the interpreter, and wrapped models of the runs, which are cycles, hold it.
    gc.collect()
    state.destroy_process_group()
