"""What goes wrong outside of the model: memory, disks, data, a loss that is no number, two runs in one folder."""

import errno
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from filelock import FileLock
from selection import in_full
from training import SAVING, arguments, logs_of, losses, packed_trainer, rows, trained
from transformers import TrainerCallback
from trl_trainers import build_packed

from trl_packfa.errors import CheckpointNotWritten, InvalidConfig, NonFiniteLoss
from trl_packfa.parallel import ranks
from trl_packfa.trainers.saving.checkpoint_files import last_whole_checkpoint
from trl_packfa.trainers.saving.lock import LOCK, only_run_in
from trl_packfa.trainers.sft.throughput import LossWatch, memory_advice

ONE_STEP = {"max_steps": 2, "check_packing": False}


def failing_forward(trainer, error, *, at=0):
    plain = trainer._prepare_inputs  # not `compute_loss`: a replaced one would get padded rows

    def prepare(inputs):
        if trainer.state.global_step == at:
            raise error
        return plain(inputs)

    trainer._prepare_inputs = prepare
    return trainer


def notes(error):
    return "\n".join([*getattr(error, "__notes__", []), str(error)])


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_says_which_budget_to_lower(kind, tmp_path):
    options = {"gradient_accumulation_steps": 2, **ONE_STEP}
    args = arguments(out=tmp_path, max_tokens_per_microbatch=200, **options)
    with pytest.raises(kind) as raised:
        failing_forward(packed_trainer(args), kind("no memory")).train()
    said = notes(raised.value)
    assert "out of memory with a micro-batch of" in said
    assert "Lower max_tokens_per_microbatch from 200 to" in said
    tokens = int(said.split("micro-batch of ")[1].split()[0])
    longest = int(said.split("longest document ")[1].split(")")[0])
    lower = int(said.split("from 200 to ")[1].split(":")[0])
    assert lower == max(longest, tokens // 2) < 200
    args = arguments(out=tmp_path, max_tokens_per_microbatch=max(lower, 80), **options)
    assert len(losses(trained(packed_trainer(args)))) == 2


@pytest.mark.parametrize(("options", "advice"), [
    ({"packing_strategy": "minibatch"}, "per_device_train_batch_size from 4 to 2 and raise gradient_accumulation"),
    ({"packing_strategy": "minibatch", "per_device_train_batch_size": 1},
     "The micro-batch is one document: lower max_length to"),
])  # fmt: skip
def test_out_of_memory_without_a_budget(options, advice, tmp_path):
    with pytest.raises(MemoryError) as raised:
        failing_forward(packed_trainer(arguments(out=tmp_path, **ONE_STEP, **options)), MemoryError("x")).train()
    assert advice in notes(raised.value)


@pytest.mark.parametrize(("allocated", "setting", "told"), [
    (30, "", True), (39, "", False), (30, "expandable_segments:True", False),
])  # fmt: skip
def test_out_of_memory_in_fragments_names_the_allocators_setting(allocated, setting, told, tmp_path, monkeypatch):
    args = arguments(out=tmp_path)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated * 2**30)
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        memory_advice(args, {"input_ids": torch.zeros(1, 8)}, budget=None),
    ):
        raise torch.OutOfMemoryError("no memory")
    said = notes(raised.value)
    assert "out of memory with a micro-batch of 8 tokens" in said
    assert ("10.0 of 40.0 GiB that torch has reserved" in said) == told
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said) == told


def test_torchs_cpu_allocator_is_understood_and_other_errors_are_left_alone(tmp_path):
    args, said = arguments(out=tmp_path, **ONE_STEP), []
    for message in ("DefaultCPUAllocator: can't allocate memory", "something else"):
        with pytest.raises(RuntimeError) as raised:
            failing_forward(packed_trainer(args), RuntimeError(message)).train()
        said.append(notes(raised.value))
    assert "max_tokens_per_microbatch" in said[0] and said[1] == "something else"


class Poison(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.at:
            next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))


@pytest.mark.parametrize("strategy", ["step", "minibatch", "bfd"])
def test_a_loss_that_is_no_number_names_step_and_documents(strategy, tmp_path):
    options = {"max_length": 80, "max_steps": 6, "logging_steps": 3, "check_packing": False}
    args = arguments(out=tmp_path, packing_strategy=strategy, **options)
    trainer = packed_trainer(args)
    trainer.add_callback(Poison(at=2))
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan at step 2") as raised:
        trainer.train()
    assert trainer.state.global_step == 3, "found when it was logged, without another wait"
    assert "document of" in str(raised.value) and "tokens: '" in str(raised.value)
    control = trained(packed_trainer(args))
    assert len(losses(control)) == 2
    assert not control._loss_watch.losses and not control._loss_watch.where, "what was logged is forgotten"


def test_the_watch_looks_without_a_log_before_it_grows():
    watch, batch = LossWatch(), {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    while not watch.is_full:
        watch.add(1, batch, torch.tensor(1.0))
    assert len(watch.losses) == 1024
    watch.require_finite(None)
    assert not watch.is_full


@contextmanager
def other_run_in(folder):
    """A process that trains into the folder until it is killed."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with only_run_in(folder):
            os.write(tell, b"in")
            signal.pause()
    assert os.read(ready, 2) == b"in"
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path, **SAVING))
    with other_run_in(tmp_path):
        with pytest.raises(InvalidConfig, match="another run is training into"):
            trainer.train()
        # without checkpoints there is nothing to fight over
        packed_trainer(arguments(out=tmp_path, **ONE_STEP)).train()
    trainer.train()  # the killed one has left no lock
    assert (tmp_path / "checkpoint-4").exists()
    assert not (tmp_path / LOCK).exists(), "a run that ends takes it away"
    with only_run_in(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_lock_that_one_rank_misses_is_refused_on_every_rank_and_released(tmp_path, monkeypatch):
    of_two, refused = SimpleNamespace(num_processes=2), (InvalidConfig, "another run is training into it")
    monkeypatch.setattr(ranks, "gather_object", lambda mine: [*mine, refused])  # the other rank's answer
    for folder in (tmp_path, None):  # a rank that saves, and one that does not
        with (
            pytest.raises(InvalidConfig, match="rank 1 of 2: another run is training"),
            only_run_in(folder, of_two),
        ):
            raise AssertionError("entered")
    assert not (tmp_path / LOCK).exists()
    monkeypatch.setattr(ranks, "gather_object", lambda mine: [*mine, None])
    with only_run_in(tmp_path, of_two), pytest.raises(InvalidConfig), only_run_in(tmp_path):
        raise AssertionError("locked twice")


def test_lock_is_released_where_an_open_file_cannot_be_deleted(tmp_path, monkeypatch):
    def is_open(self, **options):
        raise PermissionError(13, "The process cannot access the file because it is being used", str(self))

    with monkeypatch.context() as windows, only_run_in(tmp_path):
        windows.setattr(Path, "unlink", is_open)
    with only_run_in(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_said_before_the_first_step(tmp_path, monkeypatch):
    """Root may write anywhere, so that a file stands where one folder should be, and the other is a pretence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written to"), only_run_in(tmp_path / "file" / "out"):
        raise AssertionError("entered")

    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    trainer = packed_trainer(arguments(out=tmp_path, **SAVING))
    monkeypatch.setattr(FileLock, "acquire", read_only)
    with pytest.raises(InvalidConfig, match="cannot be written to: Read-only file system"):
        trainer.train()
    assert trainer.state.global_step == 0


class Accumulate(TrainerCallback):
    def __init__(self, after, steps):
        self.after, self.steps = after, steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            args.gradient_accumulation_steps = self.steps


@pytest.mark.parametrize(("kind", "before", "after", "then"), [
    ("sft", 2, 1, 4), ("sft", 2, 2, 4), ("sft", 4, 1, 2), ("sft", 4, 1, 3), ("dpo", 2, 1, 4),
])  # fmt: skip
def test_other_accumulation_while_training_is_refused(tmp_path, kind, before, after, then):
    """The Trainer would make an optimizer step without a gradient, and leave one's gradients lying."""
    options = {"gradient_accumulation_steps": before, "per_device_train_batch_size": 2, "max_steps": 4}
    options["check_packing"] = False
    dpo = kind == "dpo"
    trainer = build_packed(kind, tmp_path, **options) if dpo else packed_trainer(arguments(out=tmp_path, **options))
    trainer.add_callback(Accumulate(after, then))
    with pytest.raises(InvalidConfig, match=rf"changed to {then} while training"):
        trainer.train()
    assert trainer.state.global_step == after


def test_other_accumulation_before_training_or_of_minibatches_is_honoured(tmp_path):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "check_packing": False}
    late, expected = (packed_trainer(arguments(out=tmp_path, **options)) for _ in range(2))
    late.args.gradient_accumulation_steps = expected.args.gradient_accumulation_steps = 4
    assert losses(trained(late)) == losses(trained(expected))
    kept = packed_trainer(arguments(out=tmp_path, packing_strategy="minibatch", max_steps=4, **options))
    kept.add_callback(Accumulate(2, 4))
    assert [entry["epoch"] for entry in logs_of(trained(kept))] == [2 / 24, 4 / 24, 8 / 24, 12 / 24]


def dying(count=40):
    for i, row in enumerate(rows(count)):
        if i == 20:
            os._exit(3)
        yield row


def test_a_loader_worker_that_dies_ends_the_run_with_its_name(tmp_path):
    stream = IterableDataset.from_generator(dying)
    options = {"max_steps": 20, "dataloader_num_workers": 1, "check_packing": False, "max_length": 80}
    args = arguments(out=tmp_path, packing_strategy="minibatch", **options)
    trainer = packed_trainer(args, train_dataset=stream)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        trainer.train()
    assert trainer.state.global_step < 20


@pytest.mark.parametrize("kind", ["step", *in_full("minibatch", "step of a stream")])
def test_auto_find_batch_size_lowers_the_token_budget_too(tmp_path, kind):
    """The batch size was lowered to 1, because micro-batches stayed as large as before."""
    limit, data = 200, Dataset.from_list(rows(32))
    args = arguments(out=tmp_path, auto_find_batch_size=True, per_device_train_batch_size=8, max_length=60,
                     gradient_accumulation_steps=2, check_packing=False, packing_strategy=kind.split()[0])  # fmt: skip
    trainer = packed_trainer(args, train_dataset=data.to_iterable_dataset() if "stream" in kind else data)
    largest = []

    def runs_out(module, given, named):
        largest.append(named["input_ids"].numel())
        if largest[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    trainer.model.get_base_model().model.register_forward_pre_hook(runs_out, with_kwargs=True)
    trained(trainer)
    assert max(largest) > limit and 1 < trainer._train_batch_size < 8 and len(losses(trainer)) == 3


class LimitFiles(TrainerCallback):
    """Lets writes fail in the middle of a file, as the kernel tells of a full disk."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def test_a_full_disk_stops_the_run_and_leaves_the_last_whole_checkpoint(tmp_path):
    trainer = packed_trainer(arguments(out=tmp_path, **SAVING), callbacks=[LimitFiles()])
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = r"checkpoint-4 could not be written: .*(?i:large|I/O|write)(.|\n)*MB"
    try:
        with pytest.raises(CheckpointNotWritten, match=said):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert not (tmp_path / "checkpoint-4").exists(), "what there is of it takes the room that is missing"
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
