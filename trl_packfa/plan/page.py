"""The plan as one self-contained HTML page: the plots as one SVG, and what the terminal shows."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ..plotting import require_matplotlib
from .report import Plan
from .terminal import LABELS, WIDTH, headline, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.headline b { font-size: 2.6rem; line-height: 1.1; display: block; } .headline { font-size: 1.1rem; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; } pre { overflow-x: auto; line-height: 1.2; }
"""
_BINS = 60


def render(plan: Plan) -> str:
    """Return the HTML of the page; raise [`MissingPackage`] if matplotlib is not installed."""
    title, (number, what) = escape(f"Packing plan of {plan.source.name}"), headline(plan)
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    show(plan, console)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
<p class="headline"><b>{escape(number)}</b>{escape(what)}</p>
{_plots(plan)}
{console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")}
</body>
</html>
"""


def _plots(plan: Plan) -> str:
    """Draw all plots of the plan as one SVG."""
    matplotlib = require_matplotlib("--html")
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}
    rows = 3 if plan.memory else 2
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 4 * rows), layout="constrained")
        epochs = {name: outcome.epoch() for name, outcome in plan.outcomes.items()}
        true = np.array([epoch.tokens for epoch in epochs.values()], dtype=float)
        pads = true / (1 - np.array([epoch.padding for epoch in epochs.values()])) - true
        _bars(figure.add_subplot(rows, 2, 1), plan, {"true tokens": true, "pads": pads}, "what an epoch computes")
        _lengths(figure.add_subplot(rows, 2, 2), plan)
        steps = {"steps": np.array([epoch.steps for epoch in epochs.values()])}
        _bars(figure.add_subplot(rows, 2, 3), plan, steps, "optimizer steps of an epoch: fewer change the training")
        _waiting(figure.add_subplot(rows, 2, 4), plan)
        if plan.memory:
            parts = [asdict(plan.memory[name]) for name in epochs]
            sizes = {LABELS.get(part, part): np.array([each[part] for each in parts]) / 1e9 for part in parts[0]}
            title = "GB on one GPU at the largest micro-batch (estimate)"
            _bars(figure.add_subplot(rows, 2, (5, 6)), plan, sizes, title)
        return _svg(figure)


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


def _bars(axes: Axes, plan: Plan, parts: Mapping[str, Any], title: str) -> None:
    """Draw a bar for each strategy from parts of shape `(strategies,)`, with its total."""
    names = [f"{name} *" if name == plan.chosen.strategy.name else name for name in plan.outcomes]
    begin = np.zeros(len(names))
    bars: Any = None
    for part, values in parts.items():
        bars = axes.barh(names, values, left=begin, label=part)
        begin = begin + values
    axes.bar_label(bars, [f"{total:,.4g}" if total < 1000 else f"{total:,.0f}" for total in begin], padding=3)
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set_title(title)
    if len(parts) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _lengths(axes: Axes, plan: Plan) -> None:
    lengths, limit = plan.source.tokens.lengths, plan.args.max_length
    edges = np.unique(np.geomspace(max(lengths.min(), 1), lengths.max() + 1, _BINS).round())
    axes.hist(lengths, bins=edges.tolist() if len(edges) > 1 else 1)
    axes.set(xscale="log", xlabel="tokens", ylabel="documents", title="documents by length, before anything is cut")
    if limit is not None:
        axes.axvline(limit, color="tab:red", label=f"max_length {limit:,}")
        axes.legend(frameon=False, fontsize=8)


def _waiting(axes: Axes, plan: Plan) -> None:
    ranks = [str(ranks) for ranks in plan.chosen.epochs]
    for name, outcome in plan.outcomes.items():
        axes.plot(ranks, [epoch.imbalance for epoch in outcome.epochs.values()], marker="o", label=name)
    axes.set(xlabel="GPUs", title="how long ranks wait for each other: 1 means no waiting")
    axes.legend(frameon=False, fontsize=8)
