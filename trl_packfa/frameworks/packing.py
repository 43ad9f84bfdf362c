"""The work of every hook: put a loaded model on `attn_implementation="packfa"`, prove it, make rows of documents."""

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


def run_by_name(model: nn.Module) -> None:
    """Switch a loaded model to `attn_implementation="packfa"` by transformers' own method.

    Frameworks that check an attention's name against a list of theirs load the model with `sdpa`.

    Raises:
        [`UnsupportedModel`]: by name, if its type is not served.
        [`InvalidConfig`]: if the model is patched, or does not take the name.
    """
    if find_state(model) is not None:
        raise InvalidConfig(
            "the model is patched: its layers are told of documents without a name.",
            do="Drop this hook, or trl_packfa.patch().",
        )
    register_name()
    require_served(model)
    inner = inner_model(model)
    if not runs_by_name(model):
        inner.set_attn_implementation(NAME)
    if not runs_by_name(model):
        raise InvalidConfig(
            f"{type(inner).__name__} does not take attn_implementation='{NAME}' once it is loaded.",
            do="Pass it to trl_packfa.patch(model).",
        )
    logger.info("trl-packfa: %s runs with attn_implementation='%s'.", type(inner).__name__, NAME)


def prove(model: nn.Module) -> None:
    """Require that packing is exact on a model as it is now: adapter, dtype, quantization.

    Raises:
        [`ContaminationError`]: if it is not.
    """
    report = check(model)
    report.require_exact()
    logger.info("trl-packfa: %s", report)


def packed_row(documents: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """Documents as one row: `input_ids`, `labels`, `position_ids` and `cu_seq_lens_*`, in the types that any trainer
    moves to a device, and without a mask.

    Args:
        documents (`Sequence[Mapping[str, Any]]`):
            With `input_ids` and, optionally, `labels`.
        options (`Any`):
            Of [`DataCollatorForPacking`].
    """
    kept = [{name: row[name] for name in ("input_ids", "labels") if name in row} for row in documents]
    batch = DataCollatorForPacking(**options)(kept)
    return {name: value for name, value in batch.items() if name not in ("packed_layout", "seq_idx")}
