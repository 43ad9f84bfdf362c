"""Figures of the attention mask of a packed row and of the losses of a run. matplotlib is imported on use.

A row is drawn from document boundaries, not from a mask, so long rows cost little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidLayout, MissingPackage
from .layout import PackedLayout
from .layout.from_call import layout_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2a6f97", "#e07a1f", "#4c956c", "#9b5de5", "#c44536", "#6c757d")


def plot(
    batch_or_layout: PackedLayout | Mapping[str, Any],
    path: str | Path | None = None,
    *,
    sliding_window: int | None = None,
) -> Figure:
    """Draw the attention mask of a packed batch. Each document is a triangle, and the area between documents is white.

    ```python
    >>> trl_packfa.plot(PackedLayout.from_lengths([5, 9, 5]), "row.svg")
    ```

    Args:
        batch_or_layout ([`PackedLayout`] or `dict`):
            A layout, or a batch with document boundaries, for example from [`DataCollatorForPacking`].
        path (`str` or `Path`, *optional*):
            File to write: `.svg`, `.png` or `.pdf`.
        sliding_window (`int`, *optional*):
            Number of tokens that a token may attend to, with itself.

    Returns:
        `matplotlib.figure.Figure`: the drawing.

    Raises:
        [`InvalidLayout`]: if the batch has no document boundaries, or if the file type of `path` is unknown.
        [`MissingPackage`]: if matplotlib is not installed.
    """
    layout = batch_or_layout if isinstance(batch_or_layout, PackedLayout) else layout_of(dict(batch_or_layout))
    if layout is None:
        raise InvalidLayout(
            f"a batch with {sorted(batch_or_layout)} has no document boundaries.",  # type: ignore[arg-type]
            do="Pass a PackedLayout, or a batch of DataCollatorForPacking.",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(
            "trl_packfa.plot needs matplotlib, which is not installed.", do="pip install 'trl-packfa[plots]'"
        ) from error
    rows = _rows(layout)
    figure = Figure(figsize=(4.2 * len(rows), 4.2), layout="constrained")
    for i, row in enumerate(rows):
        _draw_row(figure.add_subplot(1, len(rows), i + 1), row, sliding_window)
    if path is not None:
        try:
            figure.savefig(path)
        except ValueError as error:
            raise InvalidLayout(f"cannot draw into {path}.", why=[str(error)], do="Use .svg, .png or .pdf.") from error
    return figure


def _rows(layout: PackedLayout) -> list[list[tuple[int, bool]]]:
    """List the documents of each row as (number of tokens, is padding)."""
    rows: list[list[tuple[int, bool]]] = [[]]
    for i, length in enumerate(layout.lengths):
        if sum(tokens for tokens, _ in rows[-1]) == layout.row_length:
            rows.append([])
        rows[-1].append((length, bool(layout.padding) and i == len(layout.lengths) - 1))
    return rows


def _draw_row(axes: Axes, row: list[tuple[int, bool]], window: int | None) -> None:
    """Draw one row on matplotlib axes, from the (number of tokens, is padding) of each document."""
    from matplotlib.patches import Polygon, Rectangle
    from matplotlib.ticker import MaxNLocator

    end, total = 0, sum(tokens for tokens, _ in row)
    for i, (tokens, padding) in enumerate(row):
        begin, end = end, end + tokens
        colour = "#d9d9d9" if padding else _COLOURS[i % len(_COLOURS)]
        # The corners of the document's area: x is the token attended to, y is the token that attends.
        corners = [(begin, begin), (end, end), (begin, end)]
        if window is not None and window < tokens:
            corners = [(begin, begin), (end, end), (end - window, end), (begin, begin + window)]
        axes.add_patch(Polygon(corners, closed=True, facecolor=colour, edgecolor="none"))
        axes.add_patch(Rectangle((begin, -0.03 * total), tokens, 0.02 * total, facecolor=colour, edgecolor="none"))
    axes.set(xlim=(0, total), ylim=(total, -0.03 * total), aspect="equal")
    axes.set(xlabel="token attended to", ylabel="token that attends")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    documents = sum(not padding for _, padding in row)
    axes.set_title(f"{documents} documents, {total:,} tokens", fontsize=10)


# File name of the loss curve in the folder of the trained model.
LOSS_CURVE = "loss_curve.png"


def save_loss_curve(history: Sequence[Mapping[str, float]], path: str | Path) -> bool:
    """Draw the logged training and evaluation losses of a run over its optimizer steps.

    `history` is `trainer.state.log_history`. Return false without a file, if matplotlib is not installed or fewer than
    two training losses were logged.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for entry in history:
        for name, value in entry.items():
            if name == "loss" or (name.startswith("eval_") and name.endswith("loss")):
                curves.setdefault(name, []).append((entry["step"], value))
    if find_spec("matplotlib") is None or len(curves.get("loss", ())) < 2:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(curves.items(), cycle(_COLOURS)):
        axes.plot(*zip(*points, strict=True), label=name, color=colour, marker="o" if name != "loss" else None)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
