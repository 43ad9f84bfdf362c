"""Shared work of the hooks: switch a loaded model to `attn_implementation="packfa"`, prove it, and pack rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..collator import DataCollatorForPacking
from ..errors import InvalidConfig
from ..exactness import check
from ..patching.apply import find_state
from ..patching.inspect import inner_model
from ..patching.named_attention import register_name
from ..patching.named_models import NAME, require_served, runs_by_name

logger = logging.getLogger(__name__)


def run_proven(model: nn.Module) -> None:
    """Switch a loaded model to `attn_implementation="packfa"`, and prove that packing is exact on it as it is.

    Frameworks that accept only attention names from their own list load the model with `sdpa`.

    Raises:
        [`UnsupportedModel`]: if the model type is not supported.
        [`InvalidConfig`]: if the model is patched already, or does not accept the name.
        [`ContaminationError`]: if packing is not exact.
    """
    if find_state(model) is not None:
        raise InvalidConfig(
            "the model is already patched with trl_packfa.patch(), so it needs no attention name.",
            do="Remove this hook, or the call of trl_packfa.patch().",
        )
    register_name()
    require_served(model)
    inner = inner_model(model)
    if not runs_by_name(model):
        inner.set_attn_implementation(NAME)
    if not runs_by_name(model):
        raise InvalidConfig(
            f"{type(inner).__name__} does not accept attn_implementation='{NAME}' after loading.",
            do="Call trl_packfa.patch(model) instead.",
        )
    logger.info("trl-packfa: %s runs with attn_implementation='%s'.", type(inner).__name__, NAME)
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
