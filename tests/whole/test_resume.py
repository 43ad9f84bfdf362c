"""Killed anywhere and resumed from the last good checkpoint: the same losses and weights, bit for bit."""

import json
import os
import random
import signal
import traceback
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from selection import IN_FULL, exhaustive
from training import arguments, dataset, logs_of, packed_trainer, rows
from transformers import TrainerCallback

from trl_packfa.trainers.saving.checkpoint_files import last_whole_checkpoint

STEPS, SAVE = 8, 2
PHASES = ("forward", "optimizer", "writing the checkpoint", "after the checkpoint")


def trainer_of(out, strategy, *, stream=False, workers=0, **options):
    args = arguments(
        out=out, packing_strategy=strategy, max_length=96, max_steps=STEPS, save_strategy="steps", save_steps=SAVE,
        gradient_accumulation_steps=2, dataloader_num_workers=workers, check_packing=False, **options,
    )  # fmt: skip
    data = IterableDataset.from_generator(rows, gen_kwargs={"count": 48}) if stream else dataset()
    return packed_trainer(args, train_dataset=data)


def in_child(work):
    """Run `work` in a fork of this process, which may be killed; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish(out, strategy, result, **options):
    """Train to the end, from the last good checkpoint if there is one, and write down what came out."""

    def work():
        trainer = trainer_of(out, strategy, **options)
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(out) is not None)
        weights = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
        torch.save(weights, result.with_suffix(".pt"))
        result.write_text(json.dumps(logs_of(trainer)))

    return in_child(work)


def killed(out, strategy, step, phase, **options):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    class Killer(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if phase == "optimizer" and state.global_step == step:
                die()

        def on_save(self, args, state, control, **kwargs):
            if phase == "after the checkpoint" and state.global_step >= step:
                die()

    def work():
        trainer = trainer_of(out, strategy, **options)
        trainer.add_callback(Killer())
        save = torch.save

        # Not `compute_loss`: a trainer whose own is replaced gets TRL's padded rows.
        def watched_forward(*args):
            if phase == "forward" and trainer.state.global_step == step:
                die()

        def half_written(content, path, *args, **kwargs):
            if phase == "writing the checkpoint" and trainer.state.global_step >= step and "checkpoint" in str(path):
                Path(path).write_bytes(b"half")
                die()
            return save(content, path, *args, **kwargs)

        trainer.model.get_input_embeddings().register_forward_pre_hook(watched_forward)
        torch.save = half_written
        trainer.train()

    assert in_child(work) == -signal.SIGKILL


def same(ours, theirs):
    a, b = (torch.load(path.with_suffix(".pt")) for path in (ours, theirs))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logged = [{e["step"]: (e["loss"], e["num_tokens"]) for e in json.loads(p.read_text())} for p in (ours, theirs)]
    assert set(logged[0]) == set(logged[1]) == set(range(1, STEPS + 1))
    assert logged[0] == logged[1]


# Where a run is killed. What it reads is all that differs with streams, loader workers and other strategies.
DRAWN = random.Random("step")
EVERY_PHASE = [(DRAWN.randrange(1, STEPS - SAVE), phase) for phase in PHASES * (3 if IN_FULL else 1)]
ONE = [(5, "forward")]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "points", "options"), [
    ("step", EVERY_PHASE, {}), ("bfd", ONE, {"stream": True}), ("wrapped", ONE, {"stream": True, "workers": 2}),
    *exhaustive(("bfd", EVERY_PHASE, {}), ("wrapped", ONE, {}), ("minibatch", ONE, {}), ("step", ONE, {"workers": 2}),
                ("step", ONE, {"stream": True}), ("minibatch", ONE, {"stream": True}), ("bfd", ONE, {"workers": 2})),
])  # fmt: skip
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, strategy, points, options):
    whole = tmp_path / "whole.json"
    assert finish(tmp_path / "whole", strategy, whole, **options) == 0
    for number, (step, phase) in enumerate(points):
        out, result = tmp_path / str(number), tmp_path / f"{number}.json"
        killed(out, strategy, step, phase, **options)
        assert finish(out, strategy, result, **options) == 0, (step, phase)
        same(result, whole)
