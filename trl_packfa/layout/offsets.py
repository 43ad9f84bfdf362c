"""Offsets of segments in a packed batch, and their sizes for compiled graphs.

Shape letters: S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def offsets_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the start of each segment and the end of the last one, int32, shape `(S + 1,)`."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), dim=0, out=offsets[1:])
    return offsets


class LayoutSizes(NamedTuple):
    """The lengths of a layout as sizes of tensors on the host, for compiled graphs.

    torch.compile recompiles for every new Python int. Sizes of tensors may be dynamic, so lengths are passed as sizes.
    torch.compile also makes separate graphs for sizes 0 and 1. Each size here is a length plus one, so it is at least
    2.

    Attributes:
        offsets (`torch.Tensor`): `cu_seqlens`, int32, shape `(S + 1,)`.
        longest (`torch.Tensor`): no elements, shape `(max_seqlen + 1, 0)`.
    """

    offsets: torch.Tensor
    longest: torch.Tensor
