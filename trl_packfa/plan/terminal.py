"""Tables and notes that show a plan on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from ..trainers.sft.memory import FORMULA
from .report import Plan

_BINS, _BAR = 14, 40
Rows = tuple[list[str], list[list[str]]]


def show(plan: Plan) -> None:
    """Print the whole plan; a pipe has no width, so it gets a fixed one."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(heading(plan), highlight=False, markup=False)
    console.print("\n".join(_histogram(plan.source.tokens.lengths, plan.args.max_length)), highlight=False)
    for title, (columns, rows) in tables(plan):
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row, style="bold" if row[0].endswith("*") else "")
        console.print(table)
    for line in notes(plan):
        console.print(line, highlight=False, markup=False)
    console.print()
    for sentence in plan.advice:
        console.print(f"- {sentence}", highlight=False, markup=False)


def heading(plan: Plan) -> str:
    """Return a line with the source of the documents and their lengths."""
    lengths, marks = plan.source.tokens.lengths, plan.lengths()
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in marks.items())
    return f"{plan.source.name}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens ({shown})"


def tables(plan: Plan) -> Iterator[tuple[str, Rows]]:
    """Yield the title, the columns and the rows of each table; the page shows the same tables."""
    world = plan.world_size
    on = f"{world} GPU{'s' if world > 1 else ''}"
    if plan.args.sequence_parallel > 1:
        on += f", {plan.args.sequence_parallel} of which share each row"
    size, steps = plan.args.per_device_train_batch_size, plan.args.gradient_accumulation_steps
    yield f"an epoch on {on}, batch size {size}, accumulation {steps} (* chosen)", _strategies(plan)
    yield f"what is cut at max_length={plan.args.max_length}", _cuts(plan)
    yield "by number of GPUs", _ranks(plan)
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


def _strategies(plan: Plan) -> Rows:
    columns = ["strategy", "steps", "examples/step", "micro-batches/step", "true tokens/micro-batch", "rows", "pads"]
    rows = []
    for name, outcome in plan.outcomes.items():
        epoch = outcome.epoch()
        examples = epoch.examples_per_step
        rows.append(
            [
                _mark(plan, name),
                f"{epoch.steps:,}",
                f"{examples:,.0f}" if examples >= 100 or examples == int(examples) else f"{examples:.1f}",
                f"{epoch.micro_batches / epoch.steps:.1f}",
                f"{epoch.tokens_per_micro_batch:,.0f}",
                f"{epoch.rows:,.0f}",
                f"{epoch.padding:.1%}",
                "-" if epoch.fill is None else f"{epoch.fill:.1%}",
                f"{plan.speed_up(outcome):.2f}x",
            ]
        )
    return [*columns, "fill", "predicted"], rows


def _cuts(plan: Plan) -> Rows:
    columns = ["strategy", "truncated", "split", "dropped: too long", "dropped: untrained", "tokens lost"]
    rows = []
    for name, outcome in plan.outcomes.items():
        cut = outcome.report
        counts = (cut.truncated, cut.split, cut.dropped_too_long, cut.dropped_untrained, cut.tokens_lost)
        documents = [f"{cut.packed_documents:,}", f"{cut.trained_tokens / cut.packed_tokens:.1%}"]
        rows.append([_mark(plan, name), *(f"{count:,}" for count in counts), *documents])
    return [*columns, "documents out", "trained tokens"], rows


def _ranks(plan: Plan) -> Rows:
    """Return steps, waiting and predicted speed-up of every strategy for each number of ranks."""
    columns = ["strategy"]
    for ranks in plan.chosen.epochs:
        columns += [f"{ranks} GPU{'s' if ranks > 1 else ''}: steps", "waiting", "predicted"]
    rows = []
    for name, outcome in plan.outcomes.items():
        row = [_mark(plan, name)]
        for ranks, epoch in outcome.epochs.items():
            row += [f"{epoch.steps:,}", f"{epoch.imbalance:.2f}x", f"{plan.speed_up(outcome, ranks):.2f}x"]
        rows.append(row)
    return columns, rows


def _memory(plan: Plan) -> Rows:
    columns = ["strategy", "tokens", "weights", "adapter", "gradients", "optimizer", "activations", "LM head", "total"]
    rows = []
    figures = [(_mark(plan, name), plan.outcomes[name], kept) for name, kept in plan.memory.items()]
    if plan.without_checkpointing is not None:
        name = f"{_mark(plan, plan.chosen.strategy.name)}, no gradient checkpointing"
        figures.append((name, plan.chosen, plan.without_checkpointing))
    for name, outcome, kept in figures:
        parts = (kept.weights, kept.adapter, kept.gradients, kept.optimizer, kept.activations, kept.logits, kept.total)
        rows.append([name, f"{outcome.epoch().largest_micro_batch:,}", *(f"{part / 1e9:.2f}" for part in parts)])
    return columns, rows


def _mark(plan: Plan, name: str) -> str:
    return f"{name} *" if name == plan.chosen.strategy.name else name


def _histogram(lengths: np.ndarray, max_length: int | None) -> Sequence[str]:
    """Return a line for each bin of lengths; bins are evenly spaced on a log scale."""
    shortest, longest = max(int(lengths.min()), 1), int(lengths.max()) + 1
    edges = np.unique(np.geomspace(shortest, longest, _BINS + 1).round().astype(int))
    counts, edges = np.histogram(lengths, bins=edges if len(edges) > 1 else np.array([shortest, longest]))
    lines, most = [], max(int(counts.max()), 1)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        beyond = "  longer than max_length" if max_length is not None and low > max_length else ""
        bar = "#" * -(-int(count) * _BAR // most)
        lines.append(f"{low:>9,} to {high - 1:>9,} tokens {count:>9,} {bar}{beyond}")
    return lines
