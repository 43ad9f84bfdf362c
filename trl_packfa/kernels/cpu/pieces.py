"""Pieces of tokens that fit into a core's second-level cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of a piece: 1 MB of float32. Half and twice this size were not faster on CPUs with 2 MB per core.
_ELEMENTS = 2**18


def pieces(*tensors: torch.Tensor, like: torch.Tensor, trailing: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same tokens of each tensor `(..., trailing dimensions)`, one piece of `like` at a time.

    Yield the tensors themselves if `like` is one piece.
    """
    if like.numel() <= _ELEMENTS:
        yield tensors
        return
    flat = [tensor.flatten(0, -trailing - 1) for tensor in tensors]
    rows = max(1, _ELEMENTS * len(flat[0]) // like.numel())
    yield from zip(*(tensor.split(rows) for tensor in flat), strict=True)


def are_worth_it(x: torch.Tensor) -> bool:
    """Tell whether pieces make the computation faster: on a CPU, outside of compiled graphs."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
