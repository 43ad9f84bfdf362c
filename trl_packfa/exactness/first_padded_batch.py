"""Check of a run's first real batch: compare its rows without padding with each row run alone.

The check of `patch` uses rows of its own. This one uses the run's data, collator and adapters. It runs inside a call
without padding, whichever code makes that call.

Shape letters: B rows, L row length, n tokens of a row, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..comparison import TOLERANCES, Comparison, nearest
from ..layout.padded_rows import PaddedRows
from ..override import set_inside
from ..parallel.zero3 import is_partitioned
from ..patching import cross_attention
from ..patching.apply import find_state
from ..patching.handed_masks import handed_masks
from ..patching.inspect import inner_model
from ..patching.unpadding import states_of
from .compare import relative_difference
from .quiet import quiet
from .rounding import last_places_off
from .subject import compute_dtype

# Smallest number of tokens that have a typical token.
_FEW = 8


def check_padded_call(
    model: nn.Module, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows
) -> Comparison | None:
    """Compare a patched model's call without padding, from inside it; see [`compare_padded_batch`].

    Return `None` if the backbone cannot run again there: with sharded weights, which are gathered once per call, and
    with activated LoRA, which finds its invocation tokens outside of the backbone.
    """
    state = find_state(model)
    assert state is not None and state.unpadding is not None
    sharded = any(hasattr(p, "device_mesh") for p in inner_model(model).parameters())
    if sharded or is_partitioned(model) or state.invocations:
        return None
    # The model is called again, which is neither counted nor watched.
    with set_inside(state.unpadding, **{**vars(state.unpadding), "watch": None}):
        return compare_padded_batch(state.parts.stack, forward, call, rows)


@torch.no_grad()
def compare_padded_batch(
    backbone: nn.Module, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows
) -> Comparison:
    """Run a padded call again without padding and without dropout, and compare some of its rows with the rows alone.

    `forward` is the unpatched forward of this patched backbone.
    """
    chosen = _choose(rows)
    with quiet(backbone, training=True):
        # Not the module, whose hooks belong to the run: one may keep only the labelled positions for the LM head.
        together = states_of(backbone.forward(**call))
        alone = [_alone(forward, call, rows, i) for i in chosen]
        with last_places_off(backbone):
            rounded = [_alone(forward, call, rows, i) for i in chosen]
    least, found = TOLERANCES[compute_dtype(backbone, together.dtype)].outputs, []
    for i, own, off in zip(chosen, alone, rounded, strict=True):
        start, length = rows.starts[i], rows.lengths[i]
        found_together = together[i, start : start + length]
        # Compare the tokens after a shared prefix separately too, because they may be few of a row's tokens.
        for last in {length, max(rows.own_tokens(i), min(length, _FEW))}:
            difference, noise = (
                relative_difference(states[-last:], own[-last:], typical=True) for states in (found_together, off)
            )
            which = f"a row of {length} tokens"
            found.append(Comparison.beside_rounding("padded batch", difference, noise, least, of=which))
    return nearest(found)


def _choose(rows: PaddedRows) -> list[int]:
    """Choose the first, last, longest and shortest row: four on every rank, because ranks run forwards together."""
    real = [i for i, length in enumerate(rows.lengths) if length]
    by_length = sorted(real, key=lambda i: rows.lengths[i])
    return [real[0], real[-1], by_length[-1], by_length[0]]


def _alone(forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, row: int) -> torch.Tensor:
    """Run one row alone; return its hidden states `(n, D)`."""
    own = {**rows.row_of_call(call, row), **cross_attention.row_of_call(call, rows, row)}
    if (masks := handed_masks(call.get("attention_mask"))) is not None:
        own["attention_mask"] = masks.of_row(rows, row)
    return states_of(forward(**own))[0]
