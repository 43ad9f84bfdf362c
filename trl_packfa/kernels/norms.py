"""Outputs of norms that a backward computes again, from what the norm keeps for its own backward.

Fused LoRA would keep a norm's output beside the norm's input. That is as much memory, for a computation of one pass.

Shape letters: T tokens, D normalized features.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Source(NamedTuple):
    """The tensors that a norm's output was made of, and the function that makes it again."""

    hidden: torch.Tensor
    weight: torch.Tensor
    norm: _Norm
    versions: tuple[int, int]  # of the output and of `hidden`


# Of the outputs that are alive. An attribute of a tensor would be saved with it.
_SOURCES: MutableMapping[torch.Tensor, Source] = WeakTensorKeyDictionary()


def run_norm(norm: _Norm, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a norm's output, and note how it was made."""
    normed = norm(hidden, weight)
    if torch.is_grad_enabled():
        _SOURCES[normed] = Source(hidden.detach(), weight, norm, (normed._version, hidden._version))
    return normed


def source_of(x: torch.Tensor) -> Source | None:
    """Return what `x` was made of, `None` if it is no norm's output or must be kept itself."""
    source = _SOURCES.get(x)
    if source is None or source.versions != (x._version, source.hidden._version):  # overwritten since
        return None
    # Under hooks on saved tensors it is kept: a checkpoint computes it again anyway, and TRL's offloading cannot move
    # what two functions save.
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    return None if hooks is None or hooks(True) else source  # torch 2.7 does not tell


def save_input(ctx: Any, x_TD: torch.Tensor, source: Source | None, *others: torch.Tensor | None) -> None:
    """Save the input of an autograd function, or what it was made of, and other tensors."""
    ctx.norm = None if source is None else source.norm
    ctx.save_for_backward(*((x_TD, None) if source is None else source[:2]), *others)


def saved_input(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the input `(T, D)` and the other tensors that [`save_input`] has saved."""
    x, weight, *others = ctx.saved_tensors
    return x if weight is None else ctx.norm(x, weight).flatten(0, -2), others
