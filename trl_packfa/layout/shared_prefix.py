"""Copy a row's tokens where documents share a prefix that the row holds only once.

A prompt with two answers is three segments of a row and two documents. Attention needs the prompt's keys once for each
answer. Other code needs whole documents, each with its own copy of the prompt.

Shape letters: T packed tokens, P copies of tokens (a shared token has several).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import InvalidLayout


# Compared by identity (no `eq`), because `==` of its tensors is no bool.
@dataclass(frozen=True, eq=False)
class TokenGather:
    """The copies of a row's parts, one after the other: a part may have several copies.

    The example has a prompt of 3 tokens with answers of 2 and 1 tokens:

    ```python
    >>> gather = TokenGather.of_segments([3, 2, 1], [(0, 1), (0, 2)])
    >>> gather.index
    tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])
    >>> gather.first_index
    tensor([0, 1, 2, 3, 4, 8])
    >>> gather.lengths, gather.copied
    ((3, 2, 1), (0, 1, 0, 2))
    ```
    """

    index: torch.Tensor  # of each copy in the row, int64, `(P,)`
    first_index: torch.Tensor  # of the first copy of each token among the copies, int64, `(T,)`
    lengths: tuple[int, ...]  # of the row's parts, in tokens
    copied: tuple[int, ...]  # the part number of each copy

    @classmethod
    def of_segments(
        cls, lengths: Sequence[int], groups: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> TokenGather:
        """Plan the copies for groups of segment numbers. `lengths` are those of all segments, in the row's order."""
        starts, segments = [0, *itertools.accumulate(lengths)], tuple(i for group in groups for i in group)
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in segments])
        first_index = torch.from_numpy(np.unique(index.numpy(), return_index=True)[1])
        return cls(index.to(device), first_index.to(device), tuple(lengths), segments)

    @classmethod
    def of_spans(
        cls, spans: Sequence[tuple[int, int]], num_tokens: int, device: torch.device | str = "cpu"
    ) -> TokenGather:
        """Plan the copies of these spans `(start, stop)`. Tokens may be in none, so `take_first` cannot be used."""
        # Spans (0, 4) and (2, 6) of 6 tokens cut them into parts of 2, and are the parts (0, 1) and (1, 2).
        cuts = sorted({0, num_tokens, *itertools.chain(*spans)})
        part = {cut: i for i, cut in enumerate(cuts)}
        lengths = [stop - start for start, stop in itertools.pairwise(cuts)]
        return cls.of_segments(lengths, [range(part[start], part[stop]) for start, stop in spans], device)

    def gather(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the copies `(P, ...)` of packed tokens `(T, ...)`; gradients of a token's copies are added."""
        if _by_index(packed):
            return packed.index_select(0, self.index)
        parts = packed.split(list(self.lengths))
        return torch.cat([parts[i] for i in self.copied])

    def take_first(self, copies: torch.Tensor) -> torch.Tensor:
        """Return packed tokens `(T, ...)` from copies `(P, ...)`: the first copy of each token."""
        if _by_index(copies):
            return copies.index_select(0, self.first_index)
        parts = copies.split([self.lengths[i] for i in self.copied])
        return torch.cat([parts[self.copied.index(i)] for i in range(len(self.lengths))])


def require_prefixes(documents: Sequence[tuple[int, ...]], segments: int) -> None:
    """Raise [`InvalidLayout`] for segments in no document, or after different segments in different documents."""
    before: dict[int, tuple[int, ...]] = {}
    for document in documents:
        for i, segment in enumerate(document):
            if before.setdefault(segment, document[:i]) != document[:i]:
                raise InvalidLayout(
                    f"segment {segment} follows segments {list(before[segment])} in one document and "
                    f"{list(document[:i])} in another.",
                    why=["a token's result depends on all tokens before it, so the segment cannot be shared"],
                    do="Share only prefixes of documents.",
                )
    if sorted(before) != list(range(segments)) or not all(documents):
        raise InvalidLayout(
            f"the documents use segments {sorted(before)}, but the row has {segments} segments.",
            do="Put each segment into a document.",
        )


def visible_segments(documents: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each segment the segments that its tokens may attend to: its prefix, then itself."""
    # Documents (0, 1) and (0, 2) give [(0,), (0, 1), (0, 2)].
    seen = {segment: document[: i + 1] for document in documents for i, segment in enumerate(document)}
    return [seen[segment] for segment in range(len(seen))]


def _by_index(tensor: torch.Tensor) -> bool:
    """Tell whether to copy tokens by index, in one launch on accelerators; on a CPU they are copied part by part."""
    # On a CPU adding the gradients of 4,096 tokens with 576 features takes hundreds of times longer by index.
    return tensor.device.type != "cpu" or torch.compiler.is_compiling()
