"""The documents that a check packs: how long they are, what stands in them, which are replaced or have a loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, count, islice
from typing import Any, TypeAlias

import torch

from .text import TEXT

Documents: TypeAlias = list[torch.Tensor]

# Lengths that find faults: one token and two, equal lengths, multiples of 16, powers of two, some past 64 and 128
# tokens (what kernels tile by); twenty of them, in one row of more than 1,024 tokens and in three.
LONG = (11, 24, 150, 1, 24, 66, 37, 5, 130, 24, 19, 66, 2, 16, 64, 16, 128, 16, 256, 16)
LONG_ROWS = ((0, 2, 18), (8, 6, 10, 16, 12, 13), (3, 4, 5, 7, 9, 11, 14, 15, 17, 19, 1))
# Three of them for what runs through a whole model, however large.
SHORT: tuple[int, ...] = (0, 3, 10)
# Arrangements, by documents of `LONG`, in which code may take another path. A shorter row ends in padding.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one document": ((6,),),
    "two documents, ascending": ((7, 10),),
    "three documents": ((0, 6, 12),),
    "four documents of one length, 64 tokens": ((13, 15, 17, 19),),
    "six documents, ascending": ((3, 12, 7, 0, 10, 1),),
    "five documents, descending, 128 tokens": ((14, 6, 1, 12, 3),),
    "four rows of one document": ((13,), (15,), (17,), (19,)),
    "five rows of unequal documents": ((0, 7), (13,), (10, 12), (15, 3), (17,)),
}
SEVERAL_ROWS = "four rows of one document"
_LONGEST = LONG.index(max(LONG))
# Of these some are longer where kernels work in tiles of up to 128 tokens: documents of one, of two and of
# more than three tiles, whose blocks of keys are whole, partial and, under a window, skipped. By place in `LONG`.
_TILED = {2: 400, 6: 380, 10: 140}
# Sliding windows up to this many tokens are outgrown by the longest document.
_WIDEST = 512
# Of a replaced document at least this share of the tokens is another.
_OTHERS = 0.5


def long_lengths(windows: Sequence[int | None], max_positions: int | None, *, tiled: bool = False) -> tuple[int, ...]:
    """`LONG` for a model: its longest document outgrows every window that can be outgrown cheaply, and none is longer
    than a table of learned positions; `tiled` for kernels that work in tiles."""
    outgrown = [window + 3 for window in windows if window and window < _WIDEST]
    wanted = [_TILED.get(i, length) if tiled else length for i, length in enumerate(LONG)]
    lengths = tuple(max([length, *outgrown]) if i == _LONGEST else length for i, length in enumerate(wanted))
    return tuple(min(length, max_positions or length) for length in lengths)


def replacements(documents: int) -> list[tuple[bool, ...]]:
    """Which documents each of a few runs replaces, none in the first, such that for every two documents two runs have
    the same second one and another first one.

    Each document is replaced in its own set of the later runs: for 5 documents in 4 runs {1}, {2}, {3}, {1, 2} and
    {1, 3}. Two of these sets never part the runs alike, so where the second stays, the first is replaced once.
    """
    # 5 documents: 2 ** 3 > 5, so 4 runs, the first of which replaces nothing.
    runs = next(n for n in count(2) if 2 ** (n - 1) > documents)
    sets = [set(members) for size in range(1, runs) for members in combinations(range(1, runs), size)]
    return [tuple(run in members for members in sets[:documents]) for run in range(runs)]


def alternating(documents: int) -> list[tuple[bool, ...]]:
    """Which documents each of three runs replaces: none, those at even places, those at odd ones. What crosses a
    boundary to a neighbour is seen."""
    even = tuple(place % 2 == 0 for place in range(documents))
    return [(False,) * documents, even, tuple(not replaced for replaced in even)]


def losses(documents: int, runs: int) -> list[list[int]]:
    """Which documents have a loss in each of the runs, such that for every two documents some run has a loss of the
    first and none of the second.

    Each document has one in its own half of the runs; no such set contains another (Sperner).
    """
    # 4 runs have 6 halves. Documents 0, 1, 2 get {0, 1}, {0, 2}, {0, 3}: run 1 has a loss of 0 and none of 1, run 2
    # the reverse.
    sets = list(islice(combinations(range(runs), runs // 2), documents))
    if len(sets) < documents:
        raise ValueError(f"{runs} runs tell {len(sets)} documents apart, not {documents}.")
    return [[document for document, members in enumerate(sets) if run in members] for run in range(runs)]


def known_tokens(documents: Sequence[Sequence[int]] | None, processing_class: Any, vocabulary: int) -> torch.Tensor:
    """Token ids `(n,)` that the model has likely been trained on: of the user's documents, or of a text in the
    tokenizer's tokens; empty without either."""
    if documents is None and processing_class is not None:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        documents = [tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    ids = [torch.as_tensor(document, dtype=torch.long) for document in documents or ()]
    known = torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)
    return known[(known >= 0) & (known < vocabulary)]


def draw_documents(
    lengths: Sequence[int], known: torch.Tensor, vocabulary: int, seed: int
) -> tuple[Documents, Documents]:
    """Documents of these lengths and what replaces each: one after the other out of the known tokens, from the start
    again where they end; random ones where there are none, or where that would replace tokens by themselves."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    # From 1 on: 0 is the padding token of many models, which some embed as zeros.
    random = torch.randint(1, vocabulary, (2, total), generator=generator)
    if len(known):
        # A short text is repeated. With a period that divides the total, replacements would be the documents
        # themselves.
        places = torch.arange(2 * total).add(seed) % len(known)
        found = known[places].view(2, total)
        if float((found[0] != found[1]).float().mean()) >= _OTHERS:
            random = found
    tokens, others = (list(ids.split(list(lengths))) for ids in random)
    for ids, other in zip(tokens, others, strict=True):
        if float((ids != other).float().mean()) < _OTHERS:
            # Of 4 tokens in the place of token 2: drawn from 0, 1, 2, and 2 becomes 3.
            other.copy_(torch.randint(0, vocabulary - 1, ids.shape, generator=generator))
            other += (other >= ids).long()  # every token another
    return tokens, others
