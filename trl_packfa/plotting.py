"""The figure of the losses of a run. matplotlib is imported on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

_COLOURS = ("#2a6f97", "#e07a1f", "#4c956c", "#9b5de5", "#c44536", "#6c757d")
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
