"""Draw README's picture: time and memory of packed training beside padded training, from a file of `trl-packfa bench`.

    python benchmarks/draw_table2.py [--results FILE.json] [--out FILE.svg]

Both sides take the same optimizer steps on the same examples. The time of the epoch is the number of true tokens
divided by the true tokens per second of the side; the file has both. Needs matplotlib (the `plots` extra).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIDES = {"padding": "TRL, padded", "step": "trl-packfa, packed"}
_COLOURS = ("#8d99ae", "#2a6f97")


def figures(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return time, memory and held-out loss of both sides, by the name that the picture shows."""
    sides = {side["side"]: side for side in report["sides"]}
    return {
        title: {
            "minutes": report["data"]["tokens"] / sides[name]["tokens_per_second"] / 60,
            "gigabytes": sides[name]["peak_bytes"] / 1e9,
            "tokens_per_second": sides[name]["tokens_per_second"],
            "loss": sides[name]["validation_loss"],
        }
        for name, title in SIDES.items()
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture as SVG. The same figures give the same file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "table2", "svg.fonttype": "none", "font.size": 10})
    rows = figures(report)
    figure = Figure(figsize=(8.4, 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (key, title, label) in zip(
        figure.subplots(1, 2, sharey=True),
        (("minutes", "Training time of one epoch (minutes)", "{:.1f}"), ("gigabytes", "Peak memory (GB)", "{:.1f}")),
        strict=True,
    ):
        bars = axis.barh(list(rows), [row[key] for row in rows.values()], color=_COLOURS)
        axis.bar_label(bars, [label.format(row[key]) for row in rows.values()], padding=3)
        axis.set_title(title, loc="left", fontsize=10)
        axis.margins(x=0.15)
        axis.set_xlim(left=0)
        axis.tick_params(left=False)
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    figure.axes[0].invert_yaxis()
    figure.patch.set_facecolor("white")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "table2.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "padded_and_packed.svg")
    wanted = parser.parse_args()
    draw(json.loads(wanted.results.read_text()), wanted.out)


if __name__ == "__main__":
    main()
