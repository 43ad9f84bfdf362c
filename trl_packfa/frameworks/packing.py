"""Shared work of the hooks: patch a loaded model, check it, and pack rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..api import patch
from ..checking import check
from ..data.collator import DataCollatorForPacking
from ..patching.state import find_state

logger = logging.getLogger(__name__)


def patch_checked(model: nn.Module) -> None:
    """Patch a loaded model unless it is patched, and check that packing is exact on it as it is.

    Raises:
        [`UnsupportedModel`]: if no patch is exact on the model.
        [`ContaminationError`]: if packing is not exact.
    """
    if find_state(model) is None:
        patch(model)
    report = check(model)
    report.require_exact()
    logger.info("trl-packfa: %s", report)


def packed_row(documents: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """Pack documents into one row: `input_ids`, `labels`, `position_ids`, `cu_seq_lens_*`, without an attention mask.

    `documents` have `input_ids` and, optionally, `labels`; `options` are those of [`DataCollatorForPacking`]. All
    values have types that any trainer can move to a device.
    """
    kept = [{name: row[name] for name in ("input_ids", "labels") if name in row} for row in documents]
    batch = DataCollatorForPacking(**options)(kept)
    return {name: value for name, value in batch.items() if name not in ("packed_layout", "seq_idx")}
