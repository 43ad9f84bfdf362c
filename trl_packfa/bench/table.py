"""Tables and remarks of a benchmark result."""

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
