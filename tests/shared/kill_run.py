"""Kill processes of small runs at seeded points, resume the runs, and print each point's result as JSON.

    kill_run.py FOLDER POINTS [SEED]

Ranks are forks of this process, which imports everything once and starts no thread. No launcher ends the surviving
ranks: they must notice the death themselves.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import distributed_run
import torch
from distributed_run import SAVE, STEPS, run
from selection import chosen
from transformers import TrainerCallback

from trl_packfa import PackedSFTTrainer
from trl_packfa.data.step_cutting import StepPlan
from trl_packfa.trainers.saving.checkpoint_files import last_whole_checkpoint

WORLD = 2
STOPPED = 30  # seconds that a collective waits for a rank that only stopped
TIME_OUT = 240  # seconds that it waits elsewhere: a machine may be busy, and a dead rank is noticed without it
GRACE = 60  # seconds that the end may take beside
SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
RUNS = {
    "ddp step": {"strategy": "step"},
    "ddp bfd": {"strategy": "bfd"},
    "fsdp2 step": {"strategy": "step", "fsdp": {"version": 2}},
    "fsdp2 sharded minibatch, full": {"strategy": "minibatch", "fsdp": SHARDED, "lora": False},
}
# Of one process. What it reads is all that differs from others, so each of these runs is killed once.
ALONE = {
    "bfd, stream": {"strategy": "bfd", "stream": True},
    "wrapped, stream, workers": {"strategy": "wrapped", "stream": True, "dataloader_num_workers": 2},
    "step": {}, "step, stream": {"stream": True}, "step, workers": {"dataloader_num_workers": 2},
    "bfd, workers": {"strategy": "bfd", "dataloader_num_workers": 2}, "wrapped": {"strategy": "wrapped"},
    "minibatch": {"strategy": "minibatch"}, "minibatch, stream": {"strategy": "minibatch", "stream": True},
}  # fmt: skip
ALONE = chosen(ALONE, "bfd, stream", "wrapped, stream, workers")
PHASES = ("forward", "optimizer", "writing", "plan", "marking", "stopped")


def draw(count, seed):
    """Draw random points of a kill: the run, the rank, the place and the time."""
    generator, points = random.Random(seed), []
    for i in range(count):
        name, phase = list(RUNS)[i % len(RUNS)], PHASES[i * len(PHASES) // count]
        victims = {"marking": [0], "stopped": [1]}.get(phase) or generator.choice([[0], [1], [0, 1]])
        points.append({"run": name, "victims": victims, "phase": phase, "step": generator.randrange(STEPS)})
    return points


def points_alone():
    """Return a point for each run of one process, after its first checkpoint."""
    phases = itertools.cycle(["writing", "forward", "optimizer"])
    return [{"run": name, "victims": [0], "phase": next(phases), "step": SAVE + 1} for name in ALONE]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(folder, work, *, world, limit=TIME_OUT):
    """Run `work(rank)` in forks of this process. Returns the exit status of each fork (`None` if it still ran at the
    limit), the text of each, and the seconds from the first failure or stop to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    port, started, struck, pids = free_port(), time.monotonic(), None, []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, world, port, folder / f"rank{rank}.log", work)
        pids.append(pid)
    codes = dict.fromkeys(pids)
    while None in codes.values() and time.monotonic() - started < limit:
        _collect(codes)
        left = [pid for pid, code in codes.items() if code is None]
        stopped = [pid for pid in left if _is_stopped(pid)]
        if struck is None and (stopped or set(codes.values()) - {None, 0}):
            struck = time.monotonic()
        if stopped == left:  # nobody is there, or only those that a point stopped
            break
        time.sleep(0.05)
    seconds = time.monotonic() - (struck or started)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(codes.values()), [(folder / f"rank{rank}.log").read_text() for rank in range(world)], seconds


def _collect(codes):
    for pid in [pid for pid, code in codes.items() if code is None]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)


def _is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _be_rank(rank, world, port, log, work):
    sys.stdout = sys.stderr = log.open("w")
    os.dup2(sys.stderr.fileno(), 2)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        work(rank)
        sys.stderr.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def arm(point):
    phase, step = point["phase"], point["step"]
    at = {"step": 0}
    how = signal.SIGSTOP if phase == "stopped" else signal.SIGKILL

    def die():
        os.kill(os.getpid(), how)

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            at["step"] = state.global_step

        def on_optimizer_step(self, args, state, control, **kwargs):
            if phase == "optimizer" and at["step"] == step:
                die()

    _before(PackedSFTTrainer, "compute_loss", lambda *a: phase in ("forward", "stopped") and at["step"] == step, die)
    _before(PackedSFTTrainer, "save_reports", lambda *a: phase == "marking" and at["step"] >= step, die)
    # A run without a `StepPlan`, or killed at step 0, dies while the epoch is planned.
    cuts = options_of(point["run"])[0].get("strategy", "step") == "step" and step > 0
    _before(PackedSFTTrainer, "_plan", lambda *a: phase == "plan" and not cuts, die)
    planned = itertools.count()  # the loader plans a step while the one before it is read
    _before(StepPlan, "cut", lambda *a: next(planned) == step and phase == "plan" and cuts, die)
    _half_written(lambda: phase == "writing" and at["step"] >= step, die)
    return [Watch()]


def _before(owner, name, condition, die):
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        if condition(*args):
            die()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def _half_written(condition, die):
    save = torch.save

    def half(content, file, *args, **kwargs):
        if condition() and "checkpoint" in str(getattr(file, "name", file)):
            if hasattr(file, "write"):
                file.write(b"half")
                file.flush()
            else:
                Path(file).write_bytes(b"half")
            die()
        return save(content, file, *args, **kwargs)

    torch.save = half


def train(folder, options, *, point=None, resume=False):
    """Run all steps on every rank; rank 0 writes the result."""

    def work(rank):
        callbacks = arm(point) if point and rank in point["victims"] else []
        if "WORLD_SIZE" in os.environ:
            distributed_run.take_fsdp_on_a_cpu()
            # transformers 5.23 drops `ddp_timeout` under `use_cpu`; it takes the process group that it finds.
            patience = STOPPED if point and point["phase"] == "stopped" else TIME_OUT
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=patience))
        result = run(str(folder), resume=resume, callbacks=callbacks, **options)
        if rank == 0:
            del result["trained"]  # what this process alone trained; a resumed one trains the rest
            weights = sorted((folder / "saved").glob("*.safetensors"))
            result["weights"] = hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()
            (folder / "result.json").write_text(json.dumps(result))

    return work


def options_of(name):
    """Return the options of a run, and its number of processes."""
    return (RUNS[name], WORLD) if name in RUNS else (ALONE[name], 1)


def outcome(folder, point, expected):
    """Kill a rank, check the remains, resume, and compare with the uninterrupted run."""
    options, world = options_of(point["run"])
    codes, texts, seconds = launch(folder, train(folder, options, point=point), world=world)
    left = last_whole_checkpoint(folder)
    found = {path.name for path in folder.glob("checkpoint-*")}
    after, resumed, _ = launch(folder, train(folder, options, resume=left is not None), world=world)
    path = folder / "result.json"
    return {
        **point,
        # Of two victims, one may have noticed the other's death before its own.
        "died": point["phase"] == "stopped" or -signal.SIGKILL in [codes[rank] for rank in point["victims"]],
        "exits": codes,
        "said": [[line[:300] for line in text.splitlines() if "Error" in line][-1:] for text in texts],
        "seconds": round(seconds, 1),
        "checkpoints": sorted(found),
        "resumed_from": left and Path(left).name,
        "passed_over": resumed[0].count("is incomplete"),
        "resumed": after,
        "same": path.exists() and json.loads(path.read_text()) == expected,
    }


def main():
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    points = [*draw(count, int(sys.argv[3]) if sys.argv[3:] else 0), *points_alone()]
    expected = {}
    for name in {point["run"]: None for point in points}:
        options, world = options_of(name)
        codes, texts, _ = launch(folder / name, train(folder / name, options), world=world)
        assert codes == [0] * world, texts[0][-3000:]
        expected[name] = json.loads((folder / name / "result.json").read_text())
    outcomes = [outcome(folder / str(i), point, expected[point["run"]]) for i, point in enumerate(points)]
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
