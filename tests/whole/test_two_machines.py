"""Two machines, simulated by two launchers on this one, with an output folder of their own for each."""

import os
import shutil
import subprocess
import sys

from launches import SHARED, free_port

LIMIT = 300


def run(folder, *, resumes=False):
    """Train on two machines and return what each said."""
    port, machines = free_port(), []
    for number in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1",
                   "--node_rank", str(number), "--master_addr", "127.0.0.1", "--master_port", port,
                   str(SHARED / "machine_run.py"), str(folder / f"machine{number}"), str(int(resumes))]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
        machines.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         env=environment))  # fmt: skip
    found = [machine.communicate(timeout=LIMIT) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(error[-3000:] for _, error in found)
    return [next(line for line in out.splitlines() if line.startswith("losses")) for out, _ in found]


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_run_resumes_after_a_machine_has_lost_its_folder(tmp_path):
    whole = run(tmp_path)
    assert whole[0] == whole[1] and whole[0].count(",") == 3
    assert all(checkpoints(tmp_path / f"machine{number}") == ["checkpoint-2", "checkpoint-4"] for number in (0, 1))
    shutil.rmtree(tmp_path / "machine1")
    shutil.rmtree(tmp_path / "machine0" / "checkpoint-4")
    assert run(tmp_path, resumes=True) == whole
    assert checkpoints(tmp_path / "machine0") == ["checkpoint-2", "checkpoint-4"]
