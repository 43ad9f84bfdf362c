"""Tables, remarks and plot of a benchmark result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rows = list[dict[str, str]]


# Columns of the table of speeds, with the text for a side that ran.
_SPEED: dict[str, Callable[[dict[str, Any]], str]] = {
    "true tokens/s": lambda side: f"{side['tokens_per_second']:,.0f}",
    "times": lambda side: _times(side["ratio"]),
    "examples/s": lambda side: f"{side['examples_per_second']:.2f}",
    "s/step (quartiles)": lambda side: "{:.3f} ({:.3f} to {:.3f})".format(
        side["seconds_per_step"], *side["seconds_per_step_quartiles"]
    ),
    "MFU": lambda side: _shown(side["mfu"], ".1%"),
    "peak memory": lambda side: f"{side['peak_bytes'] / 1e6:,.0f} MB",
}
# Those of the table of the training.
_TRAINING: dict[str, Callable[[dict[str, Any]], str]] = {
    "trainer": lambda side: side["trainer"],
    "attention": lambda side: side["attention"],
    "steps/epoch": lambda side: f"{side['steps_per_epoch']:,}",
    "tokens/step": lambda side: f"{side['tokens_per_step']:,.0f}",
    "forwards/step": lambda side: f"{side['micro_batches_per_step']:.1f}",
    "fill": lambda side: f"{side['fill']:.1%}",
    "loss, last step": lambda side: f"{side['final_loss']:.4f}",
    "validation loss": lambda side: _shown(side["validation_loss"], ".4f"),
    "recompiles": lambda side: str(side["recompiles"]),
    "host syncs/forward": lambda side: _shown(side["host_syncs_per_micro_batch"], ".1f"),
    "documents": lambda side: "see each other" if side["leaks"] else "apart",
}


def speed_rows(report: dict[str, Any]) -> Rows:
    """Return speed and memory of each side as rows; failed sides have no figures."""
    return [
        {"side": side["side"], **{column: "-" if "failed" in side else show(side) for column, show in _SPEED.items()}}
        for side in report["sides"]
    ]


def training_rows(report: dict[str, Any]) -> Rows:
    """Return the training figures of each side that trained as rows: steps, losses, recompiles and host waits."""
    return [
        {"side": side["side"], **{column: show(side) for column, show in _TRAINING.items()}}
        for side in report["sides"]
        if "failed" not in side and side["trainer"] != "none"
    ]


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _times(ratio: dict[str, Any]) -> str:
    if ratio["value"] is None:
        return "-"
    if ratio["low"] == ratio["high"]:
        return f"{ratio['value']:.2f}"
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" + (" ?" if ratio["verdict"] else "")


def remarks(report: dict[str, Any]) -> list[str]:
    """Return remarks: why sides failed, which ratios allow no conclusion, and which sides mix documents."""
    said = []
    for side in report["sides"]:
        if "failed" in side:
            said.append(f"{side['side']} failed: {side['failed']}")
        elif side["ratio"]["verdict"]:
            said.append(f"{side['side']}: {side['ratio']['verdict']}")
        if side.get("remark"):
            said.append(f"{side['side']}: runs with {side['attention']}, as {side['remark']}")
        if side.get("leaks"):
            said.append(f"{side['side']}: documents see each other; its loss is that of another training")
    return said


def heading(report: dict[str, Any]) -> str:
    """Return two lines with data, machine and versions."""
    data, place = report["data"], report["environment"]
    device = ", ".join(place["gpus"]) or f"{place['processor']}, {place['cpus']} CPUs, {place['threads']} threads"
    shown = {name: place["versions"].get(name) for name in ("torch", "transformers", "trl", "flash-attn")}
    versions = ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    return (
        f"{data['documents']:,} documents, {data['tokens']:,} tokens, mean {data['mean_length']:.0f}, "
        f"longest {data['longest']:,}; {_operations(report)}\n{device}; {versions}; "
        f"trl-packfa {place['versions'].get('trl-packfa', '')} {place['commit'] or ''}"
    )


def _operations(report: dict[str, Any]) -> str:
    if not report["model_flops_per_token"]:  # this trainer's operations are not counted
        return "MFU not counted"
    peak = f"peak {report['peak_flops'] / 1e9:,.0f} GFLOP/s ({report['peak_source']})"
    return f"{report['model_flops_per_token'] / 1e6:,.1f} MFLOPs a true token, {peak}"


def save_plot(report: dict[str, Any], path: str) -> None:
    """Draw bars of true tokens per second with their ratios, and of peak memory, one for each side that ran.

    A ratio without a conclusion has a question mark, as in the table, and its bar is hatched.
    """
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
    for axis, room in ((left, 0.45), (right, 0.25)):  # for the labels beside the bars
        axis.margins(x=room)
    figure.savefig(path, dpi=120)


def _label(side: dict[str, Any]) -> str:
    ratio = side["ratio"]
    shown = "" if ratio["value"] is None else f", {ratio['value']:.2f}x" + (" ?" if ratio["verdict"] else "")
    return f"{side['tokens_per_second']:,.0f}{shown}"
