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
from training import arguments, dataset, logs_of, losses, packed_trainer, rows, trained
from transformers import TrainerCallback

from trl_packfa.errors import InvalidConfig
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["step", *exhaustive("bfd")])
def test_a_run_killed_in_each_phase_resumes_to_the_same_bits(tmp_path, strategy):
    whole = tmp_path / "whole.json"
    assert finish(tmp_path / "whole", strategy, whole) == 0
    draw = random.Random(strategy)
    for i in range(10 if IN_FULL else len(PHASES)):
        out, result = tmp_path / str(i), tmp_path / f"{i}.json"
        step, phase = draw.randrange(1, STEPS - SAVE), PHASES[i % len(PHASES)]
        killed(out, strategy, step, phase)
        assert finish(out, strategy, result) == 0, (step, phase)
        same(result, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("wrapped", {}), ("step", {"stream": True}), ("bfd", {"stream": True}), ("step", {"workers": 2}),
     ("wrapped", {"stream": True, "workers": 2}),
     *exhaustive(("minibatch", {}), ("minibatch", {"stream": True}), ("bfd", {"workers": 2}))],
    ids=lambda value: str(value),
)  # fmt: skip
def test_resumed_elsewhere_too(tmp_path, strategy, options):
    """Streams, loader workers, the other strategies."""
    whole, result = tmp_path / "whole.json", tmp_path / "again.json"
    assert finish(tmp_path / "whole", strategy, whole, **options) == 0
    killed(tmp_path / "again", strategy, 5, "forward", **options)
    assert finish(tmp_path / "again", strategy, result, **options) == 0
    same(result, whole)


def test_a_checkpoint_without_its_report_is_passed_over(tmp_path, caplog):
    trainer = trained(trainer_of(tmp_path, "step"))
    newest = tmp_path / f"checkpoint-{STEPS}"
    (newest / "packing_report.json").unlink()
    again = trained(trainer_of(tmp_path, "step"), resume_from_checkpoint=True)
    assert f"{newest} is incomplete" in caplog.text
    assert losses(again)[-1] == losses(trainer)[-1]


def test_only_half_written_checkpoints_are_named(tmp_path):
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(InvalidConfig, match=r"no whole checkpoint(.|\n)*checkpoint-4 has no packing_report\.json"):
        trainer_of(tmp_path, "step").train(resume_from_checkpoint=True)
