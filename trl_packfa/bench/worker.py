"""Worker process of one side: it builds the trainer, then runs one optimizer step per command.

Commands arrive on stdin, events leave as JSON lines on the original stdout. The output of libraries goes to stderr.
Run it as `python -m trl_packfa.bench.worker SPEC.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import load_from_disk
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .arguments import read_arguments
from .counting import StepCounter
from .leaks import leaks
from .memory import PeakMemory
from .sides import Side, build_trainer
from .tracing import Trace, compiled_graphs
from .upstream import attention_of, upstream_attention

STEP, TRACE, FINISH = "step", "trace", "finish"


class Channel:
    """Connection to the measuring process: commands on stdin, events on the original stdout."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, event: str, **facts: Any) -> None:
        """Send one event as a JSON line."""
        self._out.write(json.dumps({"event": event, **facts}) + "\n")
        self._out.flush()

    def receive(self) -> str:
        """Wait for a command; return `FINISH` if stdin is closed."""
        return sys.stdin.readline().strip() or FINISH


class StepLoss:
    """Sum of the losses that a trainer's `training_step` returns, so that a step's loss is known without logging.

    Logging each step would be unfair: some trainers compute entropy and accuracy only in the steps that they log.
    """

    def __init__(self, trainer: Any) -> None:
        self._inner, self._losses = trainer.training_step, []
        trainer.training_step = self._listen

    def _listen(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = self._inner(*args, **kwargs)
        self._losses.append(loss)
        return loss

    def take(self) -> float:
        """Return the loss of the last step and forget it."""
        total = sum(float(loss) for loss in self._losses)
        self._losses = []
        return total


class Pacer(TrainerCallback):
    """Callback that pauses the training between two steps until the next command."""

    def __init__(self, channel: Channel, counter: StepCounter, loss: StepLoss, memory: PeakMemory) -> None:
        self.channel, self.counter, self.loss, self.memory = channel, counter, loss, memory
        self.started, self.cpu_started, self.graphs, self.finished = 0.0, 0.0, 0, False
        self.trace: Trace | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the peak memory, because the model is built, patched and proven; then wait for a command."""
        self.memory.reset()
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the figures of the finished step, then wait for the next command."""
        if self.finished:
            return
        _synchronize()
        seconds, cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu_started
        loss = self.loss.take()
        if self.trace is not None:
            self.trace.stop()
            self.channel.send("trace", **self.trace.summary())
            self.trace = None
        else:
            work = self.counter.take()._asdict()
            graphs = compiled_graphs() - self.graphs
            self.channel.send("step", seconds=seconds, cpu_seconds=cpu_seconds, loss=loss, compiled=graphs, **work)
        if state.global_step < state.max_steps:  # after the last step, no step could answer a command
            self._wait(control)

    def _wait(self, control: Any) -> None:
        command = self.channel.receive()
        if command == FINISH:
            control.should_training_stop = self.finished = True
        if command == TRACE:
            self.trace = Trace().start()
        self.graphs = compiled_graphs()
        _synchronize()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


def run(spec: dict[str, Any], channel: Channel) -> None:
    """Build the side, train on command, evaluate, and send the final figures."""
    setup, side, folder = read_arguments(spec["argv"]), Side(**spec["side"]), Path(spec["folder"])
    train: Any = load_from_disk(str(folder / "train"))
    evaluation: Any = load_from_disk(str(folder / "eval")) if (folder / "eval").exists() else None
    steps = {} if setup.args.max_steps < 0 else {"max_steps": setup.args.max_steps + setup.bench.untimed_steps + 1}
    trainer = _builder(side)(
        side,
        setup.args,
        model=spec["model"],
        tokenizer=AutoTokenizer.from_pretrained(setup.bench.tokenizer or spec["model"]),
        train=train,
        evaluation=evaluation,
        output_dir=str(folder / "output"),
        **steps,
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    memory = PeakMemory()
    remark = "" if side.kind.ours else upstream_attention(spec["model"], setup.args, named=side.backend).remark
    channel.send("ready", **_facts(trainer, side), remark=remark)
    pacer = Pacer(channel, StepCounter(trainer), StepLoss(trainer), memory)
    trainer.add_callback(pacer)
    trainer.train()
    peak = memory.peak()
    while not pacer.finished and channel.receive() != FINISH:
        channel.send("ended")
    loss = trainer.evaluate()["eval_loss"] if evaluation is not None and side.kind.trains else None
    figures = {"peak_bytes": peak, "bytes_before": memory.before, "life_peak_bytes": memory.life, "eval_loss": loss}
    channel.send("done", **figures, attention=attention_of(trainer) if side.kind.trains else None)


def _builder(side: Side) -> Callable[..., Any]:
    if side.trainer == "sft":
        return build_trainer
    from .preference import build_preference_trainer  # TRL's other trainers take seconds to import

    return build_preference_trainer


def _facts(trainer: Any, side: Side) -> dict[str, Any]:
    """Return the facts that must be equal on all sides, the steps of an epoch, and whether documents leak."""
    model, optimizer = trainer.model, trainer.args.optim
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    batches = len(trainer.get_train_dataloader())
    # Rows of the other trainers are one document each, and `padding_free` has its own proof.
    leaking = side.trainer == "sft" and leaks(trainer, side)
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
    steps = -(-batches // trainer.args.gradient_accumulation_steps)
    return {"equal": equal, "steps_per_epoch": steps, "leaks": leaking}


# Environment variables that change memory allocation and so speed.
ALLOCATOR = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "LD_PRELOAD",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main(path: str) -> None:
    """Run a side; send an event for an error too."""
    channel = Channel()
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        run(spec, channel)
    except Exception as error:
        channel.send("failed", reason=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
