"""Output of a run: one bar with the logged loss and true tokens per second, tables, and silence of the libraries."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.table import Table
from rich.text import Text
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length
from transformers.utils import logging as transformers_logging

from ..packing import PackingReport

# Seconds between two lines of a check in a pipe, and the finished share from which the time left is estimated.
_EVERY, _ENOUGH = 30.0, 0.05
# Width in characters from which a terminal has room for a bar beside the step, the loss, the speed and the times.
_WIDE = 120


@contextmanager
def checking(text: str, *, shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show the part that the check measures and its time left.

    A terminal shows one status line. A pipe gets a line at the start and then at most one every 30 seconds.
    The context manager yields the function for the argument `progress` of [`check`].
    """
    console, started, last = Console(stderr=True), time.perf_counter(), [float("-inf")]
    status = console.status(f"{text} ...") if shown and console.is_terminal else None

    def say(part: str, share: float) -> None:
        now = time.perf_counter()
        seconds = (now - started) * (1 - share) / share if share > _ENOUGH else 0.0
        # The estimate ends before the check does: its last part has no share of its own.
        left = f", about {seconds:.0f} s to go" if seconds >= 1 else ", nearly done" if share > _ENOUGH else ""
        if status is not None:
            status.update(f"{text}: {part}{left} ...")
        elif shown and now - last[0] > _EVERY:
            last[0] = now
            console.print(f"trl-packfa: {text}: {part}{left} ...", highlight=False, markup=False, soft_wrap=True)

    with status or nullcontext():
        yield say


@contextmanager
def errors_only() -> Iterator[None]:
    """Show errors only and no bars; restore every level afterwards, because the process may have other work to log."""
    own = logging.getLogger("trl_packfa")
    level, verbosity = own.level, transformers_logging.get_verbosity()
    bars, dataset_bars = transformers_logging.is_progress_bar_enabled(), is_progress_bar_enabled()
    own.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            yield
    finally:
        own.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if dataset_bars:
            enable_progress_bar()


class _Times(ProgressColumn):
    """Column with the elapsed time of a run and the time left."""

    def render(self, task: Task) -> Text:
        """Return the times as text."""
        return Text(_times(task))


def _times(task: Task) -> str:
    """Return the elapsed time, and the time left at the pace of the steps since `task.fields["began"]`, as text.

    A run that was resumed began at a later step than 0.
    """
    elapsed, done = task.elapsed or 0.0, task.completed - task.fields["began"]
    shown, left = f"{timedelta(seconds=round(elapsed))} elapsed", (task.total or 0) - task.completed
    return f"{shown}, {timedelta(seconds=round(max(elapsed / done * left, 0.0)))} to go" if done > 0 else shown


class RichProgressCallback(TrainerCallback):
    """Callback that shows `title`, steps, loss, fill, tokens per second, and evaluations with their loss.

    Without a terminal it prints a line for each log. The first and the last step are always logged.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title, self.console = title, console or Console()
        # The bar of a run, on the main process only.
        self.progress: Progress | None = None
        self.shown, self.evaluated = "", 0
        # Step and loss of every evaluation, by name of the dataset.
        self.eval_losses: dict[str, list[tuple[int, float]]] = {}

    @classmethod
    def attach(cls, trainer: Trainer, title: str, console: Console | None = None) -> RichProgressCallback:
        """Replace the Trainer's own progress bar and printer by this callback and return it."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        if trainer.args.logging_strategy == "steps":
            trainer.args.logging_first_step = True
        callback = cls(title, console)
        trainer.add_callback(callback)
        return callback

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open the bar on the main process."""
        self.shown, self.evaluated, self.eval_losses = "", 0, {}
        if not state.is_world_process_zero:
            return
        bar = (BarColumn(),) if self.console.width >= _WIDE else ()
        columns = ("{task.description}", *bar, MofNCompleteColumn(), "{task.fields[shown]}", _Times())
        self.progress = Progress(*columns, console=self.console)
        at = state.global_step
        self.progress.add_task(self.title, total=state.max_steps, completed=at, shown="", began=at)
        if self.console.is_terminal:
            self.progress.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar by one optimizer step; log the last step, whatever `logging_steps` says."""
        if args.logging_strategy == "steps" and state.global_step >= state.max_steps:
            control.should_log = True
        self._update(completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the logged values."""
        if self.progress is None or not logs or "loss" not in logs:
            return
        self.shown = "  ".join(_described(logs, _IN_BAR))
        self._update(shown=self.shown)
        line = _described(logs, _IN_LINE)
        if not self.console.is_terminal:
            line.append(_times(self.progress.tasks[0]))  # on a terminal, the bar shows them
        self._say(state, *line)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the number of evaluated batches."""
        self.evaluated += 1
        loader = kwargs.get("eval_dataloader")
        of = f"/{len(loader)}" if isinstance(loader, Sized) and has_length(loader) else ""  # type: ignore[arg-type]
        self._update(shown=f"evaluating {self.evaluated}{of}", refresh=self.console.is_terminal)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Print the loss of an evaluation with its step."""
        self.evaluated = 0
        self._update(shown=self.shown)
        for key, loss in (metrics or {}).items():
            if self.progress is None or not (found := _EVAL_LOSS.fullmatch(key)):
                continue
            name = found["name"] or ""
            self.eval_losses.setdefault(name, []).append((state.global_step, loss))
            self._say(state, f"{_titled(name)} {loss:.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the first and the last evaluation loss if there are several, then close the bar."""
        for name, losses in self.eval_losses.items():
            if len(losses) > 1:
                (first, before), (last, after) = losses[0], losses[-1]
                self._print(f"{_titled(name)}: {before:.3f} at step {first}, {after:.3f} at step {last}")
        self.close()

    def close(self) -> None:
        """Close the bar, also after a run that was interrupted."""
        if self.progress is not None:
            self.progress.stop()
        self.progress = None

    def _update(self, **fields: Any) -> None:
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], **fields)

    def _say(self, state: TrainerState, *parts: str) -> None:
        self._print("  ".join([f"{self.title}  step {state.global_step}/{state.max_steps}", *parts]))

    def _print(self, line: str) -> None:
        # In a pipe a log is one line. A terminal would break a long one inside words.
        self.console.print(line, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)


# Logged values that are shown, in this order, by TRL's names. The bar has room for a few only.
_IN_BAR = {"loss": "loss {:.3f}", "fill": "fill {:.0%}", "tokens_per_second": "{:,.0f} tokens/s"}
_IN_LINE = {
    "loss": "loss {:.3f}",
    "grad_norm": "grad_norm {:.3g}",
    "learning_rate": "learning_rate {:.3g}",
    "mean_token_accuracy": "mean_token_accuracy {:.3f}",
    "entropy": "entropy {:.3f}",
    "rewards/accuracies": "rewards/accuracies {:.3f}",
    "rewards/margins": "rewards/margins {:.3g}",
    "reward": "reward {:.4g}",
    "reward_std": "reward_std {:.4g}",
    "kl": "kl {:.3g}",
    "completions/mean_length": "completions/mean_length {:.1f}",
    "fill": "fill {:.0%}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


def _described(logs: Mapping[str, float], formats: Mapping[str, str]) -> list[str]:
    return [text.format(logs[name]) for name, text in formats.items() if name in logs]


# The Trainer's name for an evaluation loss. With several datasets it holds the dataset's name.
_EVAL_LOSS = re.compile(r"eval_((?P<name>.+)_)?loss")


def _titled(name: str) -> str:
    return f"eval loss ({name})" if name else "eval loss"


def packing_table(reports: Mapping[str, PackingReport]) -> Table:
    """Return a table of the documents and tokens that each dataset has before packing, loses and keeps."""
    columns = {name: dict(report.lines()) for name, report in reports.items()}
    table = Table("", *columns, title="what packing does to the data")
    for label in dict.fromkeys(label for column in columns.values() for label in column):
        table.add_row(label, *(column.get(label, "0") for column in columns.values()))
    return table


def plan_table(plan: Mapping[str, float]) -> Table:
    """Return a table of an epoch's figures, such as its optimizer steps and the fill of its rows."""
    table = Table("", "an epoch", title="what packing makes of it")
    for name, value in plan.items():
        if name.startswith("imbalance") and value == 1:
            continue  # a single process never waits
        if name in _SHARES:
            table.add_row(_SHARES[name], f"{value:.1%}")
        else:
            label = name.replace("micro_batch", "micro-batch").replace("_", " ")
            table.add_row(label, f"{value:,.4g}" if value % 1 else f"{value:,.0f}")
    return table


# Figures that are shares of all computed tokens, and their labels in the table.
_SHARES = {"padding_without_packing": "padding that a padded run would compute", "fill": "fill of the rows"}
