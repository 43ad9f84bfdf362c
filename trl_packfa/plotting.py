"""Figures by matplotlib, which is imported on use: who may attend to whom in a packed row, and the losses of a run.

A row is drawn from boundaries, never from a mask, so a row of any length costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidLayout, MissingPackage
from .layout import PackedLayout
from .runtime.boundaries import layout_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2a6f97", "#e07a1f", "#4c956c", "#9b5de5", "#c44536", "#6c757d")
# A drawing in characters has at most so many columns; longer rows are scaled down to it.
_COLUMNS = 60


def plot(
    batch_or_layout: PackedLayout | Mapping[str, Any],
    path: str | Path | None = None,
    *,
    sliding_window: int | None = None,
) -> Figure | str:
    """Draw who may attend to whom: each document is a triangle, and what lies between two documents stays white.

    ```python
    >>> layout = PackedLayout.from_lengths([5, 9, 5])
    >>> trl_packfa.plot(layout, "row.svg")
    >>> print(trl_packfa.plot(layout, "row.txt"))
    ```

    Args:
        batch_or_layout ([`PackedLayout`] or `dict`):
            A layout, or a batch that says where its documents begin, as [`DataCollatorForPacking`] makes it.
        path (`str` or `Path`, *optional*):
            File to write: `.svg`, `.png`, `.pdf`, or `.txt` for a drawing in characters, which needs no matplotlib.
        sliding_window (`int`, *optional*):
            Tokens that a token may look back to, itself included.

    Returns:
        `matplotlib.figure.Figure`, or the drawing itself if `path` ends in `.txt`.

    Raises:
        [`InvalidLayout`]: if the batch does not say where documents begin.
        [`MissingPackage`]: if matplotlib is not installed.
    """
    layout = batch_or_layout if isinstance(batch_or_layout, PackedLayout) else layout_of(dict(batch_or_layout))
    if layout is None:
        raise InvalidLayout(
            f"a batch with {sorted(batch_or_layout)} does not say where documents begin.",  # type: ignore[arg-type]
            do="Pass a PackedLayout, or a batch of DataCollatorForPacking.",
        )
    if path is not None and Path(path).suffix == ".txt":
        drawing = "\n\n".join(_characters(row, sliding_window) for row in _rows(layout))
        Path(path).write_text(drawing + "\n")
        return drawing
    figure = _figure(layout, sliding_window)
    if path is not None:
        try:
            figure.savefig(path)
        except ValueError as error:
            raise InvalidLayout(f"cannot draw into {path}.", why=[str(error)], do="Use .svg, .png or .txt.") from error
    return figure


def require_matplotlib(what: str) -> Any:
    """`matplotlib`, late and clearly.

    Raises:
        [`MissingPackage`]: naming the extra that has it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackage(
            f"{what} needs matplotlib, which is not installed.", do="pip install 'trl-packfa[plots]'"
        ) from error
    return matplotlib


def _rows(layout: PackedLayout) -> list[list[tuple[int, bool]]]:
    """Each row's documents: tokens, and whether they are padding."""
    rows: list[list[tuple[int, bool]]] = [[]]
    for i, length in enumerate(layout.lengths):
        if sum(tokens for tokens, _ in rows[-1]) == layout.row_length:
            rows.append([])
        rows[-1].append((length, bool(layout.padding) and i == len(layout.lengths) - 1))
    return rows


def _figure(layout: PackedLayout, window: int | None) -> Figure:
    require_matplotlib("trl_packfa.plot")
    from matplotlib.figure import Figure

    rows = _rows(layout)
    figure = Figure(figsize=(4.2 * len(rows), 4.2), layout="constrained")
    for i, row in enumerate(rows):
        draw_row(figure.add_subplot(1, len(rows), i + 1), row, window)
    return figure


def draw_row(axes: Axes, row: list[tuple[int, bool]], window: int | None = None) -> None:
    """One row on matplotlib axes, from (tokens, is padding) of its documents."""
    from matplotlib.patches import Polygon, Rectangle

    end, total = 0, sum(tokens for tokens, _ in row)
    for i, (tokens, padding) in enumerate(row):
        begin, end = end, end + tokens
        colour = "#d9d9d9" if padding else _COLOURS[i % len(_COLOURS)]
        axes.add_patch(Polygon(_outline(begin, end, window), closed=True, facecolor=colour, edgecolor="none"))
        axes.add_patch(Rectangle((begin, -0.03 * total), tokens, 0.02 * total, facecolor=colour, edgecolor="none"))
    axes.set(xlim=(0, total), ylim=(total, -0.03 * total), aspect="equal")
    axes.set(xlabel="token attended to", ylabel="token that attends")
    documents = sum(not padding for _, padding in row)
    axes.set_title(f"{documents} documents, {total:,} tokens", fontsize=10)


def _outline(begin: int, end: int, window: int | None) -> list[tuple[int, int]]:
    """Corners of what a document's tokens see: x the token attended to, y the one that attends."""
    if window is None or window >= end - begin:
        return [(begin, begin), (end, end), (begin, end)]
    return [(begin, begin), (end, end), (end - window, end), (begin, begin + window)]


def _characters(row: list[tuple[int, bool]], window: int | None) -> str:
    """`X` where a token may attend, `.` where not; a long row is scaled down, every column several tokens."""
    total = sum(tokens for tokens, _ in row)
    step = -(-total // _COLUMNS)
    document = [i for i, (tokens, _) in enumerate(row) for _ in range(tokens)][::step]
    lines = []
    for q in range(len(document)):
        near = range(len(document)) if window is None else range(max(0, q - max(window // step, 1) + 1), q + 1)
        seen = ["X" if k <= q and k in near and document[k] == document[q] else "." for k in range(len(document))]
        lines.append(" ".join(seen))
    return "\n".join(lines)


# The name of the file with a run's losses, beside what it trained.
LOSS_CURVE = "loss_curve.png"


def save_loss_curve(history: Sequence[Mapping[str, float]], path: str | Path) -> bool:
    """Draw the losses that a run has logged, of training and of each evaluation, over its optimizer steps.

    Args:
        history (`Sequence[Mapping[str, float]]`):
            `trainer.state.log_history`.
        path (`str` or `Path`):
            File to write.

    Returns:
        `bool`: whether it was drawn: not without matplotlib, nor for a run that logged a loss at one step only.
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
