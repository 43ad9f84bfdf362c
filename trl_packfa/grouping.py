"""Which documents to pad together: similar lengths, so that little is padded and calls are few."""

from __future__ import annotations

from functools import lru_cache

# A document joins a group if it is at most this much shorter than the group's longest, in tokens and as a share:
# below about 16 tokens a call's overhead outweighs the padding.
_SLACK_TOKENS = 16
_SLACK_SHARE = 0.15
# Padded tokens of one group. Keeps each temporary of a 4096-wide model under glibc's 32 MB mmap limit.
_GROUP_TOKENS = 2048


@lru_cache(maxsize=64)
def group_by_length(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Indices of the documents, in groups similar enough to be padded together."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        close = longest - lengths[i] <= max(_SLACK_TOKENS, _SLACK_SHARE * longest)
        if not groups or not close or (len(groups[-1]) + 1) * longest > _GROUP_TOKENS:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return tuple(map(tuple, groups))
