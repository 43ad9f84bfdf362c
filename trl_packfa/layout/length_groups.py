"""Group documents of similar length, so that each group becomes one batch with little padding, and calls are few.

`pad_groups` makes the batches from packed tokens, `pack_groups` makes packed tokens from the batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import PackedLayout

# A document joins a group if it is at most this much shorter than the group's longest: in tokens or as a share,
# whichever is more. Below about 16 tokens a further call costs more than the padding.
_SLACK_TOKENS = 16
_SLACK_SHARE = 0.15
# Padded tokens of one group. On a CPU the limit keeps each temporary of a 4096-wide model under glibc's 32 MB mmap
# limit. CUDA's allocator has no such limit, and every call costs kernel launches. There the limit bounds the memory of
# attention scores, which are materialized if no fused kernel serves a call.
_GROUP_TOKENS, _GROUP_TOKENS_ON_CUDA = 2048, 16384


def group_by_length(lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Return the indices of documents of these `lengths` (tokens), in groups to pad together; the longest first."""
    return _grouped(lengths, _GROUP_TOKENS_ON_CUDA if device.type == "cuda" else _GROUP_TOKENS)


@lru_cache(maxsize=64)
def _grouped(lengths: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    # For (78, 30, 80) the result is ((2, 0), (1,)): 78 tokens are within 16 of 80, 30 are not.
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        close = longest - lengths[i] <= max(_SLACK_TOKENS, _SLACK_SHARE * longest)
        if not groups or not close or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return tuple(map(tuple, groups))


def pad_groups(packed: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    """Pad packed tokens `(T, ...)` to one batch `(G, L, ...)` for each group, with zeros after shorter documents."""
    return _PadGroups.apply(packed, layout)  # type: ignore[return-value]


def pack_groups(batches: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """Pack batches `(G, L, ...)`, one for each group, into tokens `(T, ...)`: the inverse of [`pad_groups`]."""
    return _PackGroups.apply(layout, *batches)  # type: ignore[return-value]


class _PadGroups(torch.autograd.Function):
    """Padding that copies each token once; autograd's own slices copy the whole batch for each document."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
        ctx.layout = layout
        return _padded(packed, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _packed(gradients, ctx.layout), None


class _PackGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: PackedLayout, *batches: torch.Tensor) -> torch.Tensor:
        ctx.layout = layout
        return _packed(batches, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_padded(gradient, ctx.layout)


def _padded(packed: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    documents, batches = packed.split(list(layout.lengths)), []
    for group in group_by_length(layout.lengths, packed.device):
        if len(group) == 1:
            # A document that is alone in its group needs no copy: this is a view.
            batches.append(documents[group[0]][None])
            continue
        longest = layout.lengths[group[0]]
        # Not `new_zeros`: each element is written once below, with a token's value or with a zero after a document.
        batch = packed.new_empty(len(group), longest, *packed.shape[1:])
        for place, i in zip(batch.unbind(), group, strict=True):
            length = layout.lengths[i]
            place[:length].copy_(documents[i])
            if length < longest:
                place[length:].zero_()
        batches.append(batch)
    return tuple(batches)


def _packed(batches: tuple[torch.Tensor, ...], layout: PackedLayout) -> torch.Tensor:
    documents: dict[int, torch.Tensor] = {}
    for group, batch in zip(group_by_length(layout.lengths, batches[0].device), batches, strict=True):
        for place, i in zip(batch.unbind(), group, strict=True):
            # These are views, which `cat` below copies in one pass.
            documents[i] = place if len(place) == layout.lengths[i] else place[: layout.lengths[i]]
    return torch.cat([documents[i] for i in range(layout.num_documents)])
