"""What a run says about itself: metrics of each batch, reports beside each checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .collator import LOSSES
from .exactness import ExactnessReport
from .packing import PackingReport

_LOST = ("truncated", "split", "dropped", "tokens_lost")


def count_batch(metrics: Mapping[str, list[float]], inputs: dict[str, Any], *, capacity: int | None) -> None:
    """Add what a packed batch holds to the Trainer's metrics, and take out of `inputs` what is no model input.

    Args:
        metrics (`Mapping[str, list[float]]`):
            TRL's metrics of the current mode; averaged when logged.
        inputs (`dict[str, Any]`):
            The batch.
        capacity (`int` or `None`):
            Tokens that the batch has room for, where rows have a fixed length; logs `fill`.
    """
    lost = inputs.pop(LOSSES, None)
    layout = inputs.get("packed_layout")
    if layout is not None:
        metrics["documents"].append(layout.num_documents)
        metrics["longest_document"].append(layout.max_seqlen)
        if capacity:
            metrics["fill"].append(layout.num_tokens / capacity)
    if lost is not None:
        for name, count in zip(_LOST, lost, strict=True):
            metrics[name].append(count)


def write_reports(
    folder: str | Path, packing_reports: Mapping[str, PackingReport], exactness: ExactnessReport | None
) -> None:
    """Write `packing_report.json` and, once proven, `exactness_report.json` into a folder."""
    contents: dict[str, Any] = {
        "packing_report.json": {name: report.to_dict() for name, report in packing_reports.items()}
    }
    if exactness is not None:
        contents["exactness_report.json"] = exactness.to_dict()
    for name, content in contents.items():
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
