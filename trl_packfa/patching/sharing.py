"""Decide which rows of a padded batch share a common prefix, and say why others do not.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..layout.padded_rows import PaddedRows
from ..layout.shared_rows import SharedRows, shared_rows_of
from ..patches.base import Patch
from .inspect import inner_model
from .sharding import needs_whole_documents

logger = logging.getLogger(__name__)

# Arguments per token that a call may have if prefixes are to be compared by their ids alone.
_COMPARED = ("input_ids", "attention_mask", "labels")
# Rates at which a module draws random numbers while it trains.
_DRAWS = re.compile(r"drop|jitter|noise")
_NEFTUNE = "neftune_noise_alpha"


class Sharing:
    """Policy for one backbone: which of its calls compute common prefixes once.

    Attributes:
        refusal (`str` or `None`): why no call of this model does so.
    """

    def __init__(self, backbone: nn.Module, refusal: str | None) -> None:
        self.refusal, self.backbone = refusal, backbone
        self._rates: list[tuple[Any, str]] = []
        self._modules = 0
        self._told = False

    def rows_of(self, call: Mapping[str, Any], rows: PaddedRows, module: nn.Module) -> SharedRows | None:
        """Return the rows of a padded call with each common prefix once; `None` if nothing is shared."""
        ids = call.get("input_ids")
        if self.refusal or not isinstance(ids, torch.Tensor) or not self._are_all_known(call, rows):
            return None
        if (drawing := self._draws()) is not None:
            self._tell(module, drawing)
            return None
        return shared_rows_of(rows, ids)

    def tell_of_refusal(self, model: nn.Module) -> None:
        """Log why no call of this model shares anything, if none does."""
        if self.refusal:
            logger.warning(
                "trl-packfa: rows of %s share no prefixes: %s. Each row is computed separately.",
                type(inner_model(model)).__name__,
                self.refusal,
            )

    def _are_all_known(self, call: Mapping[str, Any], rows: PaddedRows) -> bool:
        """Tell whether equal ids mean equal tokens in this call: no positions, kinds or embeddings come with the
        ids."""
        return not any(
            isinstance(value, torch.Tensor) and rows.shape in (value.shape[:2], value.shape[1:])
            for name, value in call.items()
            if name not in _COMPARED
        )

    def _draws(self) -> str | None:
        """Return the name of a rate at which the model draws random numbers now: each row would draw its own."""
        modules = list(self.backbone.modules())
        if len(modules) != self._modules:  # an adapter has come, with dropout of its own
            self._modules, self._rates = len(modules), _rates_of(modules)
        drawing = ((m, rate) for m, rate in self._rates if m.training and getattr(m, rate, None))
        return next((f"{type(module).__name__}.{rate}" for module, rate in drawing), None)

    def _tell(self, module: nn.Module, drawing: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "trl-packfa: rows of %s share no prefixes while %s is not 0: each row draws its own random numbers. "
                "Set it to 0 to share them.",
                type(module).__name__,
                drawing,
            )


def _rates_of(modules: Iterable[nn.Module]) -> list[tuple[Any, str]]:
    """Return the modules and attribute names of all rates at which random numbers are drawn, 0 or not."""
    rates: list[tuple[Any, str]] = []
    for module in modules:
        if isinstance(module, nn.Embedding):
            rates.append((module, _NEFTUNE))  # transformers sets it when training begins
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if isinstance(value, float) and (_DRAWS.search(name) or (is_dropout and name == "p")):
                rates.append((module, name))
    return rates


def sharing_refusal(
    patch: Patch, mixers: Iterable[nn.Module], *, follows_length: bool, has_invocations: bool
) -> str | None:
    """Return why rows of a model cannot share a common prefix, `None` if they can.

    Args:
        patch ([`Patch`]):
            The patch of its architecture.
        mixers (`Iterable[torch.nn.Module]`):
            Its modules that run document by document.
        follows_length (`bool`):
            Whether its rotary embedding's frequencies depend on the length of a document.
        has_invocations (`bool`):
            Whether an adapter is activated by tokens.
    """
    if (refusal := needs_whole_documents(patch, mixers, has_invocations=has_invocations)) is not None:
        return refusal
    return "the rotary embedding's frequencies depend on the length of a document" if follows_length else None
