"""Groups of documents of similar length, so that padding each group to one batch pads little and calls are few.

`pad_groups` makes the batches of packed tokens, `pack_groups` packed tokens of the batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..layout import PackedLayout

# A document joins a group if it is at most this much shorter than the group's longest, in tokens and as a share:
# below about 16 tokens a call's overhead outweighs the padding.
_SLACK_TOKENS = 16
_SLACK_SHARE = 0.15
# Padded tokens of one group. On a CPU that keeps each temporary of a 4096-wide model under glibc's 32 MB mmap limit.
# CUDA's allocator has none, and every call costs its launches: there the limit bounds attention that materializes the
# scores, as it does where no fused kernel serves a call.
_GROUP_TOKENS, _GROUP_TOKENS_ON_CUDA = 2048, 16384


def group_by_length(lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Indices of documents of these `lengths` (tokens), in groups that are padded together on a device; the longest
    first."""
    return _grouped(lengths, _GROUP_TOKENS_ON_CUDA if device.type == "cuda" else _GROUP_TOKENS)


@lru_cache(maxsize=64)
def _grouped(lengths: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    # (78, 30, 80): 78 tokens are within 16 of 80, 30 are not: ((2, 0), (1,)).
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
    """Packed tokens `(T, ...)` as one batch `(G, L, ...)` per group, zeros on the right of shorter documents."""
    return _PadGroups.apply(packed, layout)  # type: ignore[return-value]


def pack_groups(batches: list[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """The way back: batches `(G, L, ...)`, one per group, as packed tokens `(T, ...)`; padding is left out."""
    return _PackGroups.apply(layout, *batches)  # type: ignore[return-value]


class _PadGroups(torch.autograd.Function):
    """Each token is copied once, and its gradient once: autograd's own slices copy the whole batch per document."""

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
            # A view: a document that shares its group with no other needs no copy.
            batches.append(documents[group[0]][None])
            continue
        longest = layout.lengths[group[0]]
        # Not `new_zeros`: each element is written once below, either a token's or a zero behind a shorter document.
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
            # Views, which `cat` below copies in one pass.
            documents[i] = place if len(place) == layout.lengths[i] else place[: layout.lengths[i]]
    return torch.cat([documents[i] for i in range(layout.num_documents)])
