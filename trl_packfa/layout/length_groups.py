"""Group documents of similar length, so that each group becomes one batch with little padding, and calls are few.

`pad_groups` makes the batches from packed tokens, `pack_groups` makes packed tokens from the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

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


def pad_groups(packed: torch.Tensor, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Pad packed tokens `(T, ...)` to one batch `(G, L, ...)` for each group, with copies of a document's last token.

    A causal module never sees what comes after a token, and a token of the document is what any module can compute.
    No gradients flow to these copies.
    """
    # Views of one split, and one `cat` for each group: each token is copied once, also in the backward, where
    # autograd's slices would copy the whole batch for each document.
    documents, batches = packed.split(list(lengths)), []
    for group in groups:
        longest, rows = max(lengths[i] for i in group), []
        for i in group:
            last = documents[i][-1:].detach()
            rows += [documents[i], last.expand(longest - lengths[i], *packed.shape[1:])]
        batches.append(torch.cat(rows).view(len(group), longest, *packed.shape[1:]))
    return batches


def pack_groups(
    batches: Sequence[torch.Tensor], lengths: Sequence[int], groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Pack batches `(G, L, ...)`, one for each group, into tokens `(T, ...)`: the inverse of [`pad_groups`]."""
    documents: dict[int, torch.Tensor] = {}
    for group, batch in zip(groups, batches, strict=True):
        for i, row in zip(group, batch.unbind(), strict=True):
            documents[i] = row[: lengths[i]]  # a view, which `cat` below copies in one pass
    return torch.cat([documents[i] for i in range(len(lengths))])
