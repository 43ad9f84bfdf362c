"""Process of one side: it builds the trainer, then answers each command, such as one optimizer step.

An answer is a dictionary of figures, `None` if the command finds no step to run, or a [`SideFailed`].
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from torch.profiler import profile
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..checking import vocabulary_of
from ..checking.compare import largest, share
from ..checking.subject import rounding_dtype
from ..comparison import TOLERANCES, Comparison
from .arguments import read_arguments
from .environment import ALLOCATOR, large_heap
from .measuring import StepCounter, compiled_graphs, peak_bytes, reset_peak, start_trace, summary
from .sides import Side, attention_of, build_trainer, upstream_attention

STEP, FINISH = "step", "finish"
# Lengths in tokens of two documents. A change of the first must not change the logits of the second.
_LENGTHS = (7, 9)
# Lines of the log of a process that died, and seconds in which a process may end by itself.
_LAST_LINES, _PATIENCE = 5, 10.0


class SideFailed(Exception):
    """Error for a side that cannot be measured; its message is the reason."""


class Pacer(TrainerCallback):
    """Callback that pauses the training between two steps until the next command."""

    def __init__(self, channel: Connection, counter: StepCounter, *, untimed_steps: int, traces: bool) -> None:
        self.channel, self.counter = channel, counter
        self.untimed_steps, self.traces = untimed_steps, traces
        self.started, self.cpu_started, self.graphs = 0.0, 0.0, 0
        self.finished = False  # the last command was FINISH
        self.trace: profile | None = None
        self.traced: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for a command."""
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the figures of the finished step, then wait for the next command; end the training after a trace.

        Reset the peak memory after the untimed steps: building, the check and its first batch are no part of a step.
        """
        _synchronize()
        if self.trace is not None:
            self.trace.stop()
            self.traced = summary(self.trace, micro_batches=self.counter.take().micro_batches)
            control.should_training_stop = True
            return
        seconds, cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu_started
        figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "compiled": compiled_graphs() - self.graphs}
        self.channel.send({**figures, **self.counter.take()._asdict()})
        if state.global_step == self.untimed_steps:
            reset_peak()
        if state.global_step < state.max_steps:  # after the last step, no step could answer a command
            self._wait(control)

    def _wait(self, control: Any) -> None:
        self.finished = self.channel.recv() == FINISH
        self.graphs = compiled_graphs()
        _synchronize()
        if self.finished and not self.traces:
            control.should_training_stop = True
        elif self.finished:
            self.trace = start_trace()  # of one more step
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


def run(argv: list[str], side: Side, model: str, folder: Path, channel: Connection) -> None:
    """Build the side, train on command, evaluate, and send the final figures."""
    setup = read_arguments(argv)
    build: Callable[..., Any] = build_trainer
    if side.trainer != "sft":
        from .preference import build_preference_trainer  # TRL's other trainers take seconds to import

        build = build_preference_trainer
    data = {
        "train_dataset": load_from_disk(str(folder / "train")),
        "eval_dataset": load_from_disk(str(folder / "eval")) if (folder / "eval").exists() else None,
        "processing_class": AutoTokenizer.from_pretrained(setup.bench.tokenizer or model),
    }
    steps = {} if setup.args.max_steps < 0 else {"max_steps": setup.args.max_steps + setup.bench.untimed_steps + 1}
    trainer = build(side, setup.args, model, data, output_dir=str(folder / "output"), **steps)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    remark = "" if side.kind.ours else upstream_attention(model, setup.args, named=side.backend).remark
    channel.send({**_facts(trainer, side), "remark": remark})
    counter = StepCounter(trainer)
    pacer = Pacer(channel, counter, untimed_steps=setup.bench.untimed_steps, traces=setup.bench.trace)
    trainer.add_callback(pacer)
    trainer.train()
    figures: dict[str, Any] = {"peak_bytes": peak_bytes()}
    while not pacer.finished and channel.recv() != FINISH:
        channel.send(None)
    evaluates = data["eval_dataset"] is not None and side.kind.trains
    figures["eval_loss"] = trainer.evaluate()["eval_loss"] if evaluates else None
    figures["attention"] = attention_of(trainer) if side.kind.trains else None
    channel.send({**figures, "trace": pacer.traced})


def _facts(trainer: Any, side: Side) -> dict[str, Any]:
    """Return the facts that must be equal on all sides, the steps of an epoch, and whether documents leak."""
    model, optimizer = trainer.model, trainer.args.optim
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    batches = len(trainer.get_train_dataloader())
    equal = {
        "device": str(trainer.args.device),
        "weights": sorted({str(p.dtype) for p in parameters}),
        "trained weights": sorted({str(p.dtype) for p in trained}),
        "parameters": sum(p.numel() for p in parameters),
        "trained parameters": sum(p.numel() for p in trained),
        "autocast": "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else "none",
        "gradient checkpointing": bool(trainer.args.gradient_checkpointing),
        "accumulation": trainer.args.gradient_accumulation_steps,
        "optimizer": f"{optimizer}, learning rate {trainer.args.learning_rate}",
        "threads": torch.get_num_threads(),
        "allocator": {name: os.environ.get(name, "") for name in ALLOCATOR},
    }
    return {
        "equal": equal,
        "steps_per_epoch": -(-batches // trainer.args.gradient_accumulation_steps),
        # Rows of the other trainers are one document each, and `padding_free` has its own check.
        "leaks": side.trainer == "sft" and leaks(trainer, side),
    }


def leaks(trainer: Any, side: Side) -> bool:
    """Replace a document and tell whether the logits of its neighbour change; with one row each they never do."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(1, vocabulary_of(trainer.model), (n,), generator=generator).tolist() for n in _LENGTHS * 2]
    was_training = trainer.model.training
    # Use training mode with equal dropout: some quantized weights can no longer be trained after evaluation mode.
    trainer.model.train()
    try:
        with torch.no_grad(), trainer.accelerator.autocast(), torch.random.fork_rng():
            first, changed = (_logits(trainer, side, [draw[i], draw[1]]) for i in (0, 2))
            least = TOLERANCES[rounding_dtype(trainer.model, first.dtype)].outputs
    finally:
        trainer.model.train(was_training)
    moved = share(largest([first], [changed]), float(first.float().std()))  # in standard deviations of the logits
    return not Comparison("isolation", moved, least).holds


def _logits(trainer: Any, side: Side, documents: list[list[int]]) -> torch.Tensor:
    """Return the logits of the second document, from the batch that the side's collator makes of both."""
    joined = [token for document in documents for token in document]
    if side.kind.strategy.fills_rows and not side.kind.ours:
        lengths = {} if side.kind.strategy.wraps else {"seq_lengths": [len(document) for document in documents]}
        examples = [{"input_ids": joined, "labels": joined, **lengths}]
    else:
        examples = [{"input_ids": document, "labels": document} for document in documents]
    batch = trainer._prepare_inputs(trainer.data_collator(examples))
    torch.manual_seed(0)
    batch.pop("labels")
    logits = trainer.model(**batch, use_cache=False).logits
    return (logits[1] if logits.shape[0] == 2 else logits[0])[-_LENGTHS[1] :]


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main(argv: list[str], side: Side, model: str, folder: Path, channel: Connection, log: Path) -> None:
    """Run a side; an error is an answer, too. All output of libraries goes to the file `log`."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        run(argv, side, model, folder, channel)
    except Exception as error:
        channel.send(SideFailed(f"{type(error).__name__}: {error}"))
        raise


class SideProcess:
    """The other end: it starts the process of a side, sends commands, and reads the log `log` if the process dies."""

    def __init__(self, argv: list[str], side: Side, model: str, folder: Path, *, log: Path) -> None:
        spawn, self._log = get_context("spawn"), log
        self._channel, theirs = spawn.Pipe()
        self._process = spawn.Process(target=main, args=(argv, side, model, folder, theirs, log))
        with large_heap():  # the allocator reads its settings when the process starts
            self._process.start()
        theirs.close()  # with two ends open here, the death of the process would not end a wait

    def ask(self, command: str) -> dict[str, Any] | None:
        """Send a command (`STEP`, `FINISH`) and return its figures; `None` if no step is left."""
        try:
            self._channel.send(command)
        except OSError as error:
            raise SideFailed(self._epitaph()) from error
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer, first the facts of the built trainer; raise [`SideFailed`] if the process died."""
        try:
            answer = self._channel.recv()
        except (EOFError, OSError) as error:
            raise SideFailed(self._epitaph()) from error
        if isinstance(answer, SideFailed):
            raise answer
        return answer

    def close(self) -> None:
        """End the process in any state. One that waits for a command ends by itself, and cleans up."""
        self._channel.close()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _epitaph(self) -> str:
        """Return the reason why a process ended without an answer."""
        self._process.join()
        code = self._process.exitcode
        if code in (-9, 137):
            return "killed by the system, most likely for its memory"
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:] if self._log.exists() else []
        return f"died with exit code {code}: " + " | ".join(lines)
