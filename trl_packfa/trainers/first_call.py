"""The first real batch of a run, as a model is called with it: its rows without pads against each row alone.

The proof that `patch` makes uses rows of its own. This one uses the run's data, collator and adapters: it runs inside
the first call that has no pads, whoever makes that call.

Shape letters: n tokens of a row, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ContaminationError
from ..exactness import quiet
from ..exactness.compare import FLOORS, NOISE_FACTOR, relative_difference
from ..exactness.rounding import last_places_off
from ..exactness.subject import compute_dtype
from ..runtime.padded_rows import PaddedRows

_ROWS = 4
# A typical token of fewer is no typical one.
_FEW = 8


class FirstCall(NamedTuple):
    """How far the hidden states of the first batch's rows are from the rows alone.

    Attributes:
        difference (`float`), allowed (`float`): relative, of the typical token of the worst row.
        tokens (`int`): of that row.
    """

    difference: float
    allowed: float
    tokens: int

    def require_exact(self, name: str) -> None:
        """Raise if they are not the same.

        Raises:
            [`ContaminationError`]: naming the model and the numbers.
        """
        if self.difference <= self.allowed:
            return
        raise ContaminationError(
            f"{name}: the first batch without its pads is not exact: the typical token of a row of {self.tokens} "
            f"tokens is off by {self.difference:.2e} (allowed {self.allowed:.2e}).",
            why=[
                "patch(model, unpad=True) found rows without pads exact: something in this batch, or in what the "
                "trainer sends with it, matters across rows"
            ],
            do="Train padded, without padding_free, and please report it.",
        )


def refuse_gradients_at_pads(states: torch.Tensor, rows: PaddedRows, name: str) -> None:
    """Raise in the backward if a loss depends on what a model computes at pads, which without pads are zeros.

    Args:
        states (`torch.Tensor`):
            The backbone's hidden states `(B, L, D)`, with gradients.
        rows ([`PaddedRows`]):
            Where its true tokens are.
        name (`str`):
            Of the model and its trainer.

    Raises:
        [`ContaminationError`]: in the backward, naming the first such place.
    """

    def look(gradient: torch.Tensor) -> None:
        at_pads = gradient.detach().flatten(0, 1).any(-1)
        at_pads[rows.index(at_pads.device)] = False
        if bool(at_pads.any()):
            row, column = divmod(int(at_pads.nonzero()[0]), rows.shape[1])
            raise ContaminationError(
                f"{name}: the loss depends on what the model computes at a pad, column {column} of row {row}.",
                why=["without pads nothing is computed there"],
                do="Mask pads in the loss, or train padded, without padding_free.",
            )

    states.register_hook(look)


@torch.no_grad()
def compare_first_call(
    backbone: nn.Module, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows
) -> FirstCall:
    """Run a padded call again without its pads, and some of its rows alone, without dropout.

    Args:
        backbone (`torch.nn.Module`):
            The patched backbone, in a call.
        forward (`Callable`):
            Its unpatched forward.
        call (`dict[str, Any]`):
            The padded call.
        rows ([`PaddedRows`]):
            Its rows.
    """
    chosen = _choose(rows)
    with quiet(backbone, training=True):
        together = backbone(**call).last_hidden_state
        alone = [_alone(backbone, forward, call, rows, i) for i in chosen]
        rounded = [_alone(backbone, forward, call, rows, i, off=True) for i in chosen]
    floor, found = FLOORS[compute_dtype(backbone, together.dtype)], []
    for i, own, off in zip(chosen, alone, rounded, strict=True):
        start, length = rows.starts[i], rows.lengths[i]
        found_together = together[i, start : start + length]
        # Of what follows a prefix that rows share by itself, too: it may be few of a row's tokens.
        for last in {length, max(rows.own_tokens(i), min(length, _FEW))}:
            noise = relative_difference(off[-last:], own[-last:], typical=True)
            difference = relative_difference(found_together[-last:], own[-last:], typical=True)
            found.append(FirstCall(difference, max(NOISE_FACTOR * noise, floor), length))
    return max(found, key=lambda first: first.difference / first.allowed)


def _choose(rows: PaddedRows) -> list[int]:
    """The first row, the last, the longest and the shortest; as many on every rank, as ranks run forwards together."""
    real = [i for i, length in enumerate(rows.lengths) if length]
    by_length = sorted(real, key=lambda i: rows.lengths[i])
    return [real[0], real[-1], by_length[-1], by_length[0]][:_ROWS]


def _alone(
    backbone: nn.Module,
    forward: Callable[..., Any],
    call: dict[str, Any],
    rows: PaddedRows,
    row: int,
    *,
    off: bool = False,
) -> torch.Tensor:
    """Hidden states `(n, D)` of one row by itself."""
    part = slice(rows.starts[row], rows.starts[row] + rows.lengths[row])
    own = {
        name: value[row : row + 1, part]
        if isinstance(value, torch.Tensor) and value.shape[:2] == rows.shape
        else value
        for name, value in call.items()
        if name not in ("attention_mask", "position_ids")
    }
    with last_places_off(backbone) if off else nullcontext():
        return forward(**own).last_hidden_state[0]
