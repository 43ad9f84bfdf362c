"""Verdicts of the tables of adapters and quantizers on one model."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from .quantizers import refuse_quantized, unread_quantizers
from .table import UNKNOWN, configs_of, kinds_of, refuse_adapter, verdict_of


class Verdicts(NamedTuple):
    """The adapters and quantizers of a model that nobody has measured wrong under packing."""

    kinds: tuple[str, ...]  # of each adapter, as `adapter name: kind`: a patched model is known again by them
    unmeasured: list[str]  # what the check on this model decides about


def verdicts_on(model: nn.Module) -> Verdicts:
    """Return the verdicts on a model's adapters, active or not, and on its quantization.

    Raise [`UnsupportedModel`] if one was measured wrong under packing.
    """
    configs = configs_of(model)
    for name, config in configs.items():
        refuse_adapter(config, name=name)
    refuse_quantized(model)
    kinds = tuple(f"{name}: {kind}" for name, config in configs.items() for kind in kinds_of(config))
    judged = [verdict_of(config) for config in configs.values()]
    unmeasured = [f"PEFT's {kind}" for verdict, kind in judged if verdict == UNKNOWN]
    return Verdicts(kinds, unmeasured + unread_quantizers(model))
