"""Tables and notes that show a plan on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .memory import FORMULA
from .report import Outcome, Plan

# The columns of a table, each with its values by row. One for each strategy fits into 80 characters.
Columns = dict[str, dict[str, str]]
# Labels of the parts of the memory that have another name.
LABELS = {"logits": "LM head"}
# Characters of a line where there is no terminal, as in a pipe.
WIDTH = 150


def show(plan: Plan, console: Console) -> None:
    """Print the whole plan."""
    console.print(heading(plan), highlight=False, markup=False)
    print_tables(plan, console)
    for line in (*notes(plan), "", *(f"- {sentence}" for sentence in plan.advice)):
        console.print(line, highlight=False, markup=False)


def print_tables(plan: Plan, console: Console) -> None:
    """Print every table, the chosen strategy in bold."""
    for title, columns in tables(plan):
        table = Table("strategy", title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        for name in columns:
            table.add_column(name, justify="right", style="bold" if "*" in name else "")
        for label in next(iter(columns.values())):
            table.add_row(label, *(cells[label] for cells in columns.values()))
        console.print(table)


def heading(plan: Plan) -> str:
    """Return a line with the source of the documents and their lengths."""
    lengths, marks = plan.source.tokens.lengths, plan.lengths()
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in marks.items())
    return f"{plan.source.name}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens ({shown})"


def tables(plan: Plan) -> Iterator[tuple[str, Columns]]:
    """Yield the title and the columns of each table."""
    on = _gpus(plan.world_size)
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


def _by_strategy(plan: Plan, cells: Callable[[Plan, Outcome], dict[str, str]]) -> Columns:
    return {_mark(plan, name): cells(plan, outcome) for name, outcome in plan.outcomes.items()}


def _epoch(plan: Plan, outcome: Outcome) -> dict[str, str]:
    epoch = outcome.epoch()
    examples = epoch.examples_per_step
    return {
        "steps": f"{epoch.steps:,}",
        "examples / step": f"{examples:,.0f}" if examples >= 100 or examples == int(examples) else f"{examples:.1f}",
        "micro-batches / step": f"{epoch.micro_batches / epoch.steps:.1f}",
        "true tokens / micro-batch": f"{epoch.tokens_per_micro_batch:,.0f}",
        "rows": f"{epoch.rows:,.0f}",
        "pads": f"{epoch.padding:.1%}",
        "fill": "-" if epoch.fill is None else f"{epoch.fill:.1%}",
        "predicted": f"{plan.speed_up(outcome):.2f}x",
    }


def _cut(plan: Plan, outcome: Outcome) -> dict[str, str]:
    cut = outcome.report
    return {
        "truncated": f"{cut.truncated:,}",
        "split": f"{cut.split:,}",
        "dropped: too long": f"{cut.dropped_too_long:,}",
        "dropped: untrained": f"{cut.dropped_untrained:,}",
        "tokens lost": f"{cut.tokens_lost:,}",
        "documents out": f"{cut.packed_documents:,}",
        "trained tokens": f"{cut.trained_tokens / cut.packed_tokens:.1%}",
    }


def _ranks(plan: Plan, outcome: Outcome) -> dict[str, str]:
    cells = {}
    for ranks, epoch in outcome.epochs.items():
        figures = {"steps": f"{epoch.steps:,}", "waiting": f"{epoch.imbalance:.2f}x"}
        figures["predicted"] = f"{plan.speed_up(outcome, ranks):.2f}x"
        cells |= {f"{_gpus(ranks)}: {what}": value for what, value in figures.items()}
    return cells


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def _memory(plan: Plan) -> Columns:
    figures = [(_mark(plan, name), plan.outcomes[name], kept) for name, kept in plan.memory.items()]
    if plan.without_checkpointing is not None:
        name = f"{_mark(plan, plan.chosen.strategy.name)}, no gradient checkpointing"
        figures.append((name, plan.chosen, plan.without_checkpointing))
    columns = {}
    for name, outcome, kept in figures:
        parts = {LABELS.get(part, part): size for part, size in asdict(kept).items()} | {"total": kept.total}
        sizes = {part: f"{size / 1e9:.2f}" for part, size in parts.items()}
        columns[name] = {"tokens": f"{outcome.epoch().largest_micro_batch:,}", **sizes}
    return columns


def _mark(plan: Plan, name: str) -> str:
    return f"{name} *" if name == plan.chosen.strategy.name else name
