"""Plot of a benchmark result, with matplotlib from the `plots` extra."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..errors import InvalidConfig


def require_matplotlib() -> None:
    """Refuse a plot without matplotlib, before anything is measured.

    Raises:
        [`InvalidConfig`]: if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InvalidConfig("a plot needs matplotlib.", do="pip install 'trl-packfa[plots]', or drop --plot.")


def save_plot(report: dict[str, Any], path: str) -> None:
    """Draw bars of true tokens per second with their ratios, and of peak memory, one for each side that ran.

    A ratio without a conclusion has a question mark, as in the table, and its bar is hatched.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sides = [side for side in report["sides"] if "failed" not in side]
    figure = Figure(figsize=(10, 0.6 * len(sides) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [side["side"] + (" (contaminated)" if side["leaks"] else "") for side in sides]
    speed = left.barh(names, [side["tokens_per_second"] for side in sides], color="tab:blue")
    left.bar_label(speed, [_label(side) for side in sides], padding=3)
    unclear = [bool(side["ratio"]["verdict"]) for side in sides]
    for bar, nothing in zip(speed, unclear, strict=True):
        bar.set(hatch="//" if nothing else None, edgecolor="white")
    left.set_xlabel("true tokens per second" + ("\n(? and hatched: no conclusion)" if any(unclear) else ""))
    memory = right.barh(names, [side["peak_bytes"] / 1e6 for side in sides], color="tab:gray")
    right.bar_label(memory, [f"{side['peak_bytes'] / 1e6:,.0f}" for side in sides], padding=3)
    right.set_xlabel("peak memory, MB")
    left.invert_yaxis()
    for axis in (left, right):
        axis.margins(x=0.25)
    figure.savefig(path, dpi=120)


def _label(side: dict[str, Any]) -> str:
    ratio = side["ratio"]
    shown = "" if ratio["value"] is None else f", {ratio['value']:.2f}x" + (" ?" if ratio["verdict"] else "")
    return f"{side['tokens_per_second']:,.0f}{shown}"
