"""Decide which rows of a padded batch share a common prefix, and say why others do not.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..layout import PackedLayout
from ..layout.padded_rows import PaddedRows
from ..layout.shared_rows import SharedDocuments, SharedRows, shared_documents_of, shared_rows_of
from .inspect import inner_model

logger = logging.getLogger(__name__)

# Arguments per token that a call may have if prefixes are to be compared by their ids alone. In a packed call it may
# also have those that say what its layout says.
_COMPARED = ("input_ids", "attention_mask", "labels")
_OF_LAYOUT = ("position_ids", "seq_idx")
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
        ids = self._comparable_ids(call, rows.shape, module, known=_COMPARED)
        return None if ids is None else shared_rows_of(rows, ids)

    def documents_of(self, call: Mapping[str, Any], layout: PackedLayout, module: nn.Module) -> SharedDocuments | None:
        """Return the documents of a packed call with each common prefix once; `None` if nothing is shared."""
        shape = (layout.rows, layout.row_length)
        ids = self._comparable_ids(call, shape, module, known=(*_COMPARED, *_OF_LAYOUT))
        if ids is None or not _count_from_zero(call.get("position_ids"), layout):
            return None
        return shared_documents_of(layout, ids)

    def _comparable_ids(
        self, call: Mapping[str, Any], shape: tuple[int, int], module: nn.Module, *, known: Sequence[str]
    ) -> torch.Tensor | None:
        """Return the ids of a call `(B, L)` if equal ids mean equal results; `None` if they may not.

        They may not if positions, kinds or embeddings come with the ids, or if random numbers are drawn.
        """
        ids = call.get("input_ids")
        if self.refusal or not isinstance(ids, torch.Tensor):
            return None
        by_token = [
            name
            for name, value in call.items()
            if isinstance(value, torch.Tensor) and shape in (value.shape[:2], value.shape[1:])
        ]
        if any(name not in known for name in by_token):
            return None
        drawing = self._draws()
        if drawing is not None and not self._told:
            self._told = True
            logger.warning(
                "trl-packfa: rows of %s share no prefixes while %s is not 0: each row draws its own random numbers. "
                "Set it to 0 to share them.",
                type(module).__name__,
                drawing,
            )
        return ids if drawing is None else None

    def tell_of_refusal(self, model: nn.Module) -> None:
        """Log why no call of this model shares anything, if none does."""
        if self.refusal:
            logger.warning(
                "trl-packfa: rows of %s share no prefixes: %s. Each row is computed separately.",
                type(inner_model(model)).__name__,
                self.refusal,
            )

    def _draws(self) -> str | None:
        """Return the name of a rate at which the model draws random numbers now: each row would draw its own."""
        modules = list(self.backbone.modules())
        if len(modules) != self._modules:  # an adapter has come, with dropout of its own
            self._modules, self._rates = len(modules), _rates_of(modules)
        drawing = ((m, rate) for m, rate in self._rates if m.training and getattr(m, rate, None))
        return next((f"{type(module).__name__}.{rate}" for module, rate in drawing), None)


def _count_from_zero(position_ids: torch.Tensor | None, layout: PackedLayout) -> bool:
    """Tell whether positions are those of the layout; on an accelerator a collator's are trusted, as elsewhere."""
    if position_ids is None or position_ids.device.type != "cpu":
        return position_ids is None or layout.prefix_tree is not None
    return torch.equal(position_ids, layout.position_ids().to(position_ids))


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
