"""`PrefixTree`: the segments that documents are made of, if some of them begin alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Shorter prefixes are computed in each document. Every further segment needs one more attention call in every layer,
# which is not worth it for a short header that all documents begin with.
SHORTEST = 16


class PrefixTree(NamedTuple):
    """The segments of a row that holds each common prefix once, and the segments of each document, the prefix first.

    An example with the documents [5, 6, 7, 8] and [5, 6, 7, 9, 9], if a prefix of three tokens is enough:

    ```python
    >>> tree = PrefixTree.of([np.array([5, 6, 7, 8]), np.array([5, 6, 7, 9, 9])], shortest=3)
    >>> tree.segments, tree.documents, tree.num_tokens, tree.saved
    ((3, 1, 2), ((0, 1), (0, 2)), 6, 3)
    ```
    """

    segments: tuple[int, ...]  # lengths in tokens
    documents: tuple[tuple[int, ...], ...]  # segment numbers, see [`PackedLayout`]

    @classmethod
    def of(cls, documents: Sequence[np.ndarray], *, shortest: int = SHORTEST) -> PrefixTree:
        """Find the common prefixes of documents, integer arrays of at least one token each.

        A prefix of two or more documents is one segment, and so is a common continuation of some of these documents.
        """
        # In sorted order documents with a common prefix are neighbours. In [5, 6, 7], [5, 6, 8], [9] they share 2 and
        # 0 tokens.
        order = sorted(range(len(documents)), key=lambda i: documents[i].tolist())
        alike = [common_length(documents[a], documents[b]) for a, b in itertools.pairwise(order)]
        segments: list[int] = []
        found: list[tuple[int, ...]] = [()] * len(documents)
        # Each entry: neighbours from `first` up to `stop`, whose first `depth` tokens are in the segments `before`.
        # The last entry comes next, so that a prefix lies beside its continuations.
        waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
        while waiting:
            first, stop, depth, before = waiting.pop()
            is_one = stop - first == 1
            end = len(documents[order[first]]) if is_one else min(alike[first : stop - 1])
            if end - depth >= (1 if is_one else shortest):
                before = (*before, len(segments))
                segments.append(end - depth)
                depth = end
            if is_one:
                found[order[first]] = before
                continue
            cuts = [first, *(i + 1 for i in range(first, stop - 1) if alike[i] == end), stop]
            waiting += [(begin, until, depth, before) for begin, until in itertools.pairwise(cuts)][::-1]
        return cls(tuple(segments), tuple(found))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a row that holds each prefix once, T."""
        return sum(self.segments)

    @property
    def saved(self) -> int:
        """Number of tokens that a row of whole documents has more."""
        return sum(self.segments[i] for document in self.documents for i in document) - self.num_tokens

    @property
    def squares(self) -> int:
        """Sum of the squares of the documents' lengths, each prefix counted once: twice the keys that are seen."""
        # A document of 5 tokens whose first 3 are shared adds 25 - 9, the prefix 9.
        ends = {}
        for document in self.documents:
            lengths = [self.segments[i] for i in document]
            ends |= dict(zip(document, itertools.accumulate(lengths), strict=True))
        return sum(end**2 - (end - self.segments[i]) ** 2 for i, end in ends.items())


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens that two documents begin with alike."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
