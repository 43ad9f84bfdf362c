"""Plots of a plan, as SVG to embed in the HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batching import FREE, Batching
from ..packing import MINIBATCH, PADDED, STEP
from ..plotting import draw_row, require_matplotlib
from .compare import Outcome
from .report import Plan
from .terminal import LABELS, gpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each colour has one meaning on the page.
_TRUE, _PADS, _WARNING = "#2a6f97", "#e9b872", "#c44536"
_STRATEGIES = {PADDED.name: "#b5bdc4", MINIBATCH.name: "#7f8f9b", STEP.name: "#4c956c"}
_OTHER_STRATEGY = "#8fb996"
_PARTS = {
    "weights": "#5e548e",
    "adapter": "#9f86c0",
    "gradients": "#be95c4",
    "optimizer": "#e0b1cb",
    "activations": "#6d597a",
    "logits": "#c9c5cb",
}
_BINS = 60
# Units of tokens, of which a bar has five or more.
_UNITS = ((1e9, "billions of tokens"), (1e6, "millions of tokens"), (1e3, "thousands of tokens"), (1, "tokens"))


def figures(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the caption and the SVG of each plot, the two that matter most first.

    Raise [`MissingPackage`] if matplotlib is not installed.
    """
    matplotlib = require_matplotlib("--html")
    style = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    with matplotlib.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        yield "What an epoch computes: true tokens and pads.", _svg(_tokens(plan))
        yield "Documents by length, before anything is cut.", _svg(_lengths(plan))
        yield "Optimizer steps of an epoch. Fewer steps change the training.", _svg(_steps(plan))
        yield "How long ranks wait for each other: 1 means no waiting.", _svg(_waiting(plan))
        if plan.memory:
            yield "Memory of one GPU at the largest micro-batch, an estimate.", _svg(_memory(plan))
        packing = plan.chosen if plan.chosen.strategy.packs else plan.outcomes[STEP.name]
        what = f"One packed micro-batch of '{packing.strategy}', drawn from your documents"
        yield f"{what}: which token may attend to which.", _svg(_row(plan, packing))


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # The page's colours show through, in the dark as well.
    figure.savefig(
        text, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    # A fixed size in points would not shrink with the window. `viewBox` keeps the proportions.
    return re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)


def _whole(axis: Any) -> None:
    """Let an axis count in whole units."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5, integer=True))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _axes(height: float = 3.2) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, height), layout="constrained")
    return figure, figure.add_subplot()


def _lengths(plan: Plan) -> Figure:
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = _axes()
    lengths, limit = plan.source.tokens.lengths, plan.args.max_length
    edges = np.unique(np.geomspace(max(lengths.min(), 1), lengths.max() + 1, _BINS).round())
    axes.hist(lengths, bins=edges if len(edges) > 1 else 1, color=_TRUE)
    axes.set(xscale="log", xlabel="tokens", ylabel="documents")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    _whole(axes.yaxis)
    if limit is not None:
        axes.axvline(limit, color=_WARNING, linewidth=1)
        axes.annotate(f"max_length {limit:,}", (limit, 1), xycoords=("data", "axes fraction"), rotation=90,
                      xytext=(3, -4), textcoords="offset points", va="top", color=_WARNING, fontsize=8)  # fmt: skip
    return figure


def _bars(plan: Plan) -> tuple[Figure, Any, list[str]]:
    figure, axes = _axes()
    names = list(plan.outcomes)
    axes.set_yticks(range(len(names)), [f"{n} *" if n == plan.chosen.strategy.name else n for n in names])
    axes.invert_yaxis()
    return figure, axes, names


def _tokens(plan: Plan) -> Figure:
    figure, axes, names = _bars(plan)
    epochs = [plan.outcomes[name].epoch() for name in names]
    true = np.array([epoch.tokens for epoch in epochs], dtype=float)
    pads = true / (1 - np.array([epoch.padding for epoch in epochs])) - true
    unit, word = next((u, w) for u, w in _UNITS if (true + pads).max() >= 5 * u or u == 1)
    axes.barh(range(len(names)), true / unit, color=_TRUE, label="true tokens")
    axes.barh(range(len(names)), pads / unit, left=true / unit, color=_PADS, label="pads")
    axes.set_xlabel(word)
    _whole(axes.xaxis)
    figure.legend(frameon=False, ncols=2, fontsize=8, loc="outside upper center")
    return figure


def _steps(plan: Plan) -> Figure:
    figure, axes, names = _bars(plan)
    steps = [plan.outcomes[name].epoch().steps for name in names]
    fewer = [plan.outcomes[name].strategy.fills_rows for name in names]
    colours = [_WARNING if few and count < steps[0] else _TRUE for few, count in zip(fewer, steps, strict=True)]
    bars = axes.barh(range(len(names)), steps, color=colours)
    axes.bar_label(bars, [f"{count:,}" for count in steps], padding=3)
    axes.set_xmargin(0.15)
    axes.set_xlabel("optimizer steps")
    _whole(axes.xaxis)
    return figure


def _waiting(plan: Plan) -> Figure:
    figure, axes = _axes()
    wanted = dict.fromkeys(strategy.name for strategy in (PADDED, MINIBATCH, STEP, plan.chosen.strategy))
    shown = [name for name in wanted if name in plan.outcomes]
    ranks = list(plan.chosen.epochs)
    for i, name in enumerate(shown):
        values = [plan.outcomes[name].epochs[n].imbalance for n in ranks]
        width = 0.8 / len(shown)
        at = np.arange(len(ranks)) + (i - (len(shown) - 1) / 2) * width
        bars = axes.bar(at, values, width, label=name, color=_STRATEGIES.get(name, _OTHER_STRATEGY))
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(ranks)), [gpus(n) for n in ranks])
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(0)
    axes.set_ymargin(0.25)
    axes.legend(frameon=False, ncols=len(shown), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.15))
    return figure


def _memory(plan: Plan) -> Figure:
    figure, axes, names = _bars(plan)
    begin = np.zeros(len(names))
    for part, colour in _PARTS.items():
        values = np.array([getattr(plan.memory[name], part) for name in names]) / 1e9
        bars = axes.barh(range(len(names)), values, left=begin, color=colour, label=LABELS.get(part, part))
        begin += values
    axes.bar_label(bars, [f"{total:.1f}" for total in begin], padding=3)
    axes.set_xmargin(0.1)
    axes.set_xlabel("GB")
    _whole(axes.xaxis)
    figure.legend(frameon=False, ncols=3, fontsize=8, loc="outside upper center")
    return figure


def _row(plan: Plan, outcome: Outcome) -> Figure:
    figure, axes = _axes(height=5.0)
    draw_row(axes, [(int(tokens), False) for tokens in _first_micro_batch(plan, outcome)])
    return figure


def _first_micro_batch(plan: Plan, outcome: Outcome) -> list[int]:
    """Return the document lengths of one packed micro-batch."""
    q, cut = (plan.shape.quadratic, plan.shape.cut) if plan.shape else (0.0, FREE)
    batching = Batching.of(plan.args, strategy=outcome.strategy, world_size=outcome.epoch().world_size,
                           quadratic=q, cut=cut)  # fmt: skip
    if outcome.strategy.fills_rows:
        sampler = batching.row_sampler(outcome.lengths)
        return outcome.lengths[sampler.share(sampler.rounds()[0], 0)].tolist()
    step = batching.draw(outcome.lengths)[: batching.accumulation]
    if not outcome.strategy.recuts_steps:
        return [tokens for tokens in step[0, 0].tolist() if tokens]
    return batching.recut(step, budget=batching.micro_batch_tokens(outcome.lengths))[0][0].tolist()
