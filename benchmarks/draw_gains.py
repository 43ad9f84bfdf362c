"""Draw README's pictures: what packing gains, from the first table of `docs/benchmarks.md`, and a packed row's mask.

    python benchmarks/draw_gains.py [--out FOLDER]

Needs matplotlib (the `plots` extra). The same table gives the same files.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GAINS, MASK = "gains.svg", "packed_row.svg"
# Words of the table's first column, and what the picture calls the row.
_ROWS = {
    "short math documents": "SFT, lengths\nof math answers",
    "uneven lengths": "SFT, lengths\nas in FLAN",
    "DPO": "DPO, lengths\nas in FLAN",
}
_PADDED, _PACKED = "#8d99ae", "#2a6f97"
_DOCUMENTS, _COLOURS = (5, 9, 5), ("#2a6f97", "#e07a1f", "#4c956c")


class Gain(NamedTuple):
    """A row of the table: gigabytes, padded and packed, and how often as fast it is."""

    name: str
    memory: tuple[float, float]
    times: str


def gains() -> list[Gain]:
    """Read the rows from the page."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = page.split("## Training speed")[1].split("\n\n")[2].splitlines()[2:]
    found = []
    for words, name in _ROWS.items():
        *_, times, memory = next(
            [cell.strip() for cell in line.strip("|").split("|")] for line in table if words in line
        )
        held = [float(number) for number in re.findall(r"[\d.]+(?= GB)", memory)]
        found.append(Gain(name, (held[0], held[1]), times.split()[0]))
    return found


def draw(folder: Path) -> None:
    """Write both pictures as SVG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcParams.update({"svg.hashsalt": "gains", "svg.fonttype": "none", "font.size": 10})
    rows = gains()
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    for axis, title, values, label in (
        (speed, "True tokens per second, padded = 1", [(1.0, float(row.times)) for row in rows], "{:.2f}"),
        (memory, "Peak memory (GB)", [row.memory for row in rows], "{:.1f}"),
    ):
        for side, (colour, name) in enumerate(((_PADDED, "TRL, padded"), (_PACKED, "trl-packfa, packed"))):
            lengths = [pair[side] for pair in values]
            bars = axis.barh([at + 0.4 * side - 0.2 for at in places], lengths, 0.36, color=colour, label=name)
            axis.bar_label(bars, [label.format(value) for value in lengths], padding=3)
        axis.set_title(title, loc="left", fontsize=10)
        axis.margins(x=0.15)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _bare(axis)
    speed.set_yticks(places, [row.name for row in rows])
    speed.invert_yaxis()
    figure.legend(*speed.get_legend_handles_labels(), frameon=False, ncols=2, loc="outside upper center")
    _save(figure, folder / GAINS)
    row = Figure(figsize=(4.2, 4.2), layout="constrained")
    _draw_mask(row.add_subplot(1, 1, 1))
    _save(row, folder / MASK)


def _draw_mask(axes: Any) -> None:
    """Draw each document as the triangle of what its tokens attend to. The area between documents is white."""
    from matplotlib.patches import Polygon, Rectangle
    from matplotlib.ticker import MaxNLocator

    end, total = 0, sum(_DOCUMENTS)
    for tokens, colour in zip(_DOCUMENTS, _COLOURS, strict=True):
        begin, end = end, end + tokens
        corners = [(begin, begin), (end, end), (begin, end)]
        axes.add_patch(Polygon(corners, closed=True, facecolor=colour, edgecolor="none"))
        axes.add_patch(Rectangle((begin, -0.03 * total), tokens, 0.02 * total, facecolor=colour, edgecolor="none"))
    axes.set(xlim=(0, total), ylim=(total, -0.03 * total), aspect="equal")
    axes.set(xlabel="token attended to", ylabel="token that attends")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(f"{len(_DOCUMENTS)} documents, {total:,} tokens", fontsize=10)


def _bare(axis: Any) -> None:
    axis.tick_params(left=False)
    for spine in ("top", "right"):
        axis.spines[spine].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.patch.set_facecolor("white")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
