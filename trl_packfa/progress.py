"""A training run on the terminal: one progress bar with the loss and the true tokens per second.

Uses what the Trainer logs and nothing else, so it shows any run of any trainer that counts `num_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .packing import PackingReport

# Seconds between the lines of a check in a pipe, and the share of it from which the rest can be estimated.
_EVERY, _ENOUGH = 30.0, 0.05


@contextmanager
def proving(text: str, *, shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Shows what the check measures and how long it has yet to run: on a terminal in place, in a pipe a line at the
    start and one for every minute or so.

    Yields what [`check`] takes as `progress`.
    """
    console, started, last = Console(stderr=True), time.perf_counter(), [float("-inf")]
    status = console.status(f"{text} ...") if shown and console.is_terminal else None

    def say(part: str, share: float) -> None:
        now = time.perf_counter()
        left = f", about {(now - started) * (1 - share) / share:.0f} s to go" if share > _ENOUGH else ""
        if status is not None:
            status.update(f"{text}: {part}{left} ...")
        elif shown and now - last[0] > _EVERY:
            last[0] = now
            console.print(f"trl-packfa: {text}: {part}{left} ...", highlight=False, markup=False, soft_wrap=True)

    with status or nullcontext():
        yield say


class RichProgressCallback(TrainerCallback):
    """Shows `title`, steps, loss, fill and tokens per second; where there is no terminal, a line per log."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title, self.console = title, console or Console()
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.last: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def attach(cls, trainer: Trainer, title: str, console: Console | None = None) -> RichProgressCallback:
        """Put it in the place of the Trainer's own progress bar and printer."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        callback = cls(title, console)
        trainer.add_callback(callback)
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar on the main process."""
        self.last = (time.perf_counter(), 0.0)
        if not state.is_world_process_zero:
            return
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
        ]
        self.progress = Progress(*columns, TimeElapsedColumn(), console=self.console)
        self.task = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step, shown="")
        if self.console.is_terminal:
            self.progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One optimizer step further."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show what was logged."""
        if self.progress is None or self.task is None or not logs or "loss" not in logs:
            return
        shown = f"loss {logs['loss']:.3f}"
        if "fill" in logs:
            shown += f"  fill {logs['fill']:.0%}"
        shown += self._speed(logs.get("num_tokens", 0.0))
        self.progress.update(self.task, shown=shown)
        if not self.console.is_terminal:
            self.console.print(f"{self.title}  step {state.global_step}/{state.max_steps}  {shown}", highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def _speed(self, tokens: float) -> str:
        """True tokens per second since the last log."""
        now = time.perf_counter()
        (before, tokens_before), self.last = self.last, (now, tokens)
        return f"  {(tokens - tokens_before) / (now - before):,.0f} tokens/s" if tokens > tokens_before else ""


def packing_table(reports: Mapping[str, PackingReport]) -> Table:
    """What packing does to each dataset: documents and tokens in, lost and out."""
    columns = {name: dict(report.lines()) for name, report in reports.items()}
    table = Table("", *columns, title="what packing does to the data")
    for label in dict.fromkeys(label for column in columns.values() for label in column):
        table.add_row(label, *(column.get(label, "0") for column in columns.values()))
    return table


def plan_table(plan: Mapping[str, float]) -> Table:
    """What an epoch comes to."""
    table = Table("", "an epoch", title="what packing makes of it")
    for name, value in plan.items():
        if name.startswith("imbalance") and value == 1:
            continue  # one process waits for nobody
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if value % 1 else f"{value:,.0f}")
    return table
