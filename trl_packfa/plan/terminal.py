"""Tables and notes that show a plan on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..trainers.sft.memory import FORMULA
from .compare import Outcome
from .report import Plan

# Number of bins of a histogram, the longest bar, and the width of a line without its bar.
_BINS, _BAR, _BESIDE = 14, 40, 62
_UNLIMITED = 10_000
# A row of a table: each column with its value.
Row = list[tuple[str, str]]
# Labels of the parts of the memory that have another name.
LABELS = {"logits": "LM head"}


def show(plan: Plan) -> None:
    """Print the whole plan; a pipe has no width, so it gets a fixed one."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(heading(plan), highlight=False, markup=False)
    lines = _histogram(plan.source.tokens.lengths, plan.args.max_length, width=console.width)
    console.print("\n".join(lines), highlight=False)
    for title, rows in tables(plan):
        console.print(fitting_table(title, rows, console))
    for line in notes(plan):
        console.print(line, highlight=False, markup=False)
    console.print()
    for sentence in plan.advice:
        console.print(f"- {sentence}", highlight=False, markup=False)


def fitting_table(title: str, rows: Sequence[Row], console: Console) -> Table:
    """Return a table with a line for each row; on a narrow console, with a column for each row instead."""
    table = Table(title=title, title_justify="left")
    for i, (column, _) in enumerate(rows[0]):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(value for _, value in row), style="bold" if is_chosen(row) else "")
    if console.measure(table, options=console.options.update(width=_UNLIMITED)).maximum <= console.width:
        return table
    table = Table(rows[0][0][0], title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_column(row[0][1], justify="right", style="bold" if is_chosen(row) else "")
    for at in range(1, len(rows[0])):
        label = rows[0][at][0].replace("/", " / ")  # lines break at spaces
        table.add_row(label, *(row[at][1] for row in rows))
    return table


def heading(plan: Plan) -> str:
    """Return a line with the source of the documents and their lengths."""
    lengths, marks = plan.source.tokens.lengths, plan.lengths()
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in marks.items())
    return f"{plan.source.name}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens ({shown})"


def headline(plan: Plan) -> tuple[str, str]:
    """Return the number that matters most, and what it says: the predicted speed of the chosen strategy."""
    chosen, padding = plan.chosen, plan.padded.epoch().padding
    what = f"as fast as padded training, predicted for '{chosen.strategy.name}': {padding:.0%} of the places of the "
    return f"{plan.speed_up(chosen):.2f} times", f"{what}padded batches are padding"


def is_chosen(row: Row) -> bool:
    """Tell whether a row is about the chosen strategy."""
    return row[0][1].endswith("*")


def gpus(number: int) -> str:
    """Return a number of GPUs as text."""
    return f"{number} GPU{'s' if number > 1 else ''}"


def tables(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    """Yield the title and the rows of each table; the page shows the same tables."""
    on = gpus(plan.world_size)
    if plan.args.sequence_parallel > 1:
        on += f", {plan.args.sequence_parallel} of which share each row"
    size, steps = plan.args.per_device_train_batch_size, plan.args.gradient_accumulation_steps
    yield f"an epoch on {on}, batch size {size}, accumulation {steps} (* chosen)", _by_strategy(plan, _epoch)
    yield f"what is cut at max_length={plan.args.max_length}", _by_strategy(plan, _cut)
    yield "by number of GPUs", _by_strategy(plan, _ranks)
    if plan.memory:
        yield "GB on one GPU at the largest micro-batch (estimate)", _memory(plan)


def notes(plan: Plan) -> list[str]:
    """Return the notes that explain the figures of the tables."""
    lines = [
        "fill: true tokens divided by the room in the rows (the padded batch, the token budget, max_length).",
        f"predicted: {plan.basis}",
        "waiting: duration of the epoch, divided by its duration if no rank had to wait.",
    ]
    if plan.source.on_images:
        lines.append("bfd, bfd_split and wrapped: left out: rows of images cannot be filled before training.")
    elif plan.args.max_length is None:
        lines.append("bfd, bfd_split and wrapped: left out: they fill rows of max_length tokens, which is None.")
    if plan.memory:
        return [*lines, f"memory: {FORMULA}. CUDA's own context and fragmentation come on top."]
    return [*lines, "memory: left out, because no model is given (--model_name_or_path; its config is enough)."]


def _by_strategy(plan: Plan, cells: Callable[[Plan, Outcome], Row]) -> list[Row]:
    return [[("strategy", _mark(plan, name)), *cells(plan, outcome)] for name, outcome in plan.outcomes.items()]


def _epoch(plan: Plan, outcome: Outcome) -> Row:
    epoch = outcome.epoch()
    examples = epoch.examples_per_step
    return [
        ("steps", f"{epoch.steps:,}"),
        ("examples/step", f"{examples:,.0f}" if examples >= 100 or examples == int(examples) else f"{examples:.1f}"),
        ("micro-batches/step", f"{epoch.micro_batches / epoch.steps:.1f}"),
        ("true tokens/micro-batch", f"{epoch.tokens_per_micro_batch:,.0f}"),
        ("rows", f"{epoch.rows:,.0f}"),
        ("pads", f"{epoch.padding:.1%}"),
        ("fill", "-" if epoch.fill is None else f"{epoch.fill:.1%}"),
        ("predicted", f"{plan.speed_up(outcome):.2f}x"),
    ]


def _cut(plan: Plan, outcome: Outcome) -> Row:
    cut = outcome.report
    return [
        ("truncated", f"{cut.truncated:,}"),
        ("split", f"{cut.split:,}"),
        ("dropped: too long", f"{cut.dropped_too_long:,}"),
        ("dropped: untrained", f"{cut.dropped_untrained:,}"),
        ("tokens lost", f"{cut.tokens_lost:,}"),
        ("documents out", f"{cut.packed_documents:,}"),
        ("trained tokens", f"{cut.trained_tokens / cut.packed_tokens:.1%}"),
    ]


def _ranks(plan: Plan, outcome: Outcome) -> Row:
    row = []
    for ranks, epoch in outcome.epochs.items():
        row += [(f"{gpus(ranks)}: steps", f"{epoch.steps:,}"), ("waiting", f"{epoch.imbalance:.2f}x")]
        row += [("predicted", f"{plan.speed_up(outcome, ranks):.2f}x")]
    return row


def _memory(plan: Plan) -> list[Row]:
    figures = [(_mark(plan, name), plan.outcomes[name], kept) for name, kept in plan.memory.items()]
    if plan.without_checkpointing is not None:
        name = f"{_mark(plan, plan.chosen.strategy.name)}, no gradient checkpointing"
        figures.append((name, plan.chosen, plan.without_checkpointing))
    rows = []
    for name, outcome, kept in figures:
        tokens = f"{outcome.epoch().largest_micro_batch:,}"
        parts = {LABELS.get(part, part): size for part, size in asdict(kept).items()} | {"total": kept.total}
        sizes = [(part, f"{size / 1e9:.2f}") for part, size in parts.items()]
        rows.append([("strategy", name), ("tokens", tokens), *sizes])
    return rows


def _mark(plan: Plan, name: str) -> str:
    return f"{name} *" if name == plan.chosen.strategy.name else name


def _histogram(lengths: np.ndarray, max_length: int | None, *, width: int) -> Sequence[str]:
    """Return a line of at most `width` characters for each bin of lengths; bins are evenly spaced on a log scale."""
    longest_bar = min(max(width - _BESIDE, 1), _BAR)
    shortest, longest = max(int(lengths.min()), 1), int(lengths.max()) + 1
    edges = np.unique(np.geomspace(shortest, longest, _BINS + 1).round().astype(int))
    counts, edges = np.histogram(lengths, bins=edges if len(edges) > 1 else np.array([shortest, longest]))
    lines, most = [], max(int(counts.max()), 1)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        beyond = "  longer than max_length" if max_length is not None and low > max_length else ""
        bar = "#" * -(-int(count) * longest_bar // most)
        lines.append(f"{low:>9,} to {high - 1:>9,} tokens {count:>9,} {bar}{beyond}")
    return lines
