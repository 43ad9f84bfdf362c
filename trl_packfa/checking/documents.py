"""The documents that a check packs: their lengths and tokens, and which are replaced or have a loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, count, islice
from typing import Any, TypeAlias

import torch

Documents: TypeAlias = list[torch.Tensor]

# Lengths that find faults: one token and two, equal lengths, multiples of 16, powers of two, and some above 64 and 128
# tokens (the tile sizes of kernels). The twenty documents run in one row of more than 1,024 tokens and in three rows.
LONG = (11, 24, 150, 1, 24, 66, 37, 5, 130, 24, 19, 66, 2, 16, 64, 16, 128, 16, 256, 16)
LONG_ROWS = ((0, 2, 18), (8, 6, 10, 16, 12, 13), (3, 4, 5, 7, 9, 11, 14, 15, 17, 19, 1))
# Three of them, for runs through all layers of a model of any size.
SHORT: tuple[int, ...] = (0, 3, 10)
# Arrangements of documents of `LONG` in which code may take another path. Shorter rows end in padding. `draw_shapes`
# adds others, and the three documents of `SHORT` are one more.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one document": ((6,),),
    "two documents, ascending": ((7, 2),),
    "four documents of one length, 64 tokens": ((13, 15, 17, 19),),
    "five documents, descending, 128 tokens": ((14, 6, 1, 12, 3),),
    "six documents, ascending": ((3, 12, 7, 0, 10, 1),),
    "four rows of one document": ((13,), (15,), (17,), (19,)),
    "five rows of unequal documents": ((0, 7), (13,), (10, 12), (15, 3), (17,)),
}
SEVERAL_ROWS = "four rows of one document"
# The arrangement in which every position of the documents passes the LM head: some beyond the hundredth.
SCORED = "two documents, ascending"
# Documents of `LONG` that are put into drawn arrangements, and the numbers of rows that are drawn.
_SMALL, _ROWS = tuple(i for i, length in enumerate(LONG) if length <= 24), (1, 2, 3, 6, 7, 8)
# Documents of at least so many tokens may begin alike, in up to so many tokens: fewer than would be computed once.
_TEMPLATED, _ALIKE = 5, 8
# Number of documents that hold a special token.
_WITH_SPECIAL = 4
_LONGEST = LONG.index(max(LONG))
# Some documents, by place in `LONG`, are longer if kernels work in tiles of up to 128 tokens. They then have one, two
# and more than three tiles, whose blocks of keys are whole, partial and, with a window, skipped.
_TILED = {2: 400, 6: 380, 10: 140}
# The longest document exceeds sliding windows of up to this many tokens.
_WIDEST = 512
# The least share of a replaced document's tokens that must change.
_OTHERS = 0.5
# For models with a tokenizer but without documents: plain English of several kinds.
_TEXT = """\
A bakery on the corner opens at six in the morning. The first customers are nurses who come from the night shift, and
drivers who start before the traffic does. They buy bread that is still warm, two rolls with cheese, a small coffee.
At eight the children come past on their way to school, and by ten only the raisin buns are left.

Question: A train leaves at 14:05 and travels 180 kilometres at 90 kilometres per hour. When does it arrive?
Answer: 180 divided by 90 is 2, so the journey takes two hours. The train arrives at 16:05.

def mean(values):
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)

user: Can you give me three ideas for a rainy Sunday with two small children?
assistant: Of course. Build a tent of blankets and read in it with a torch. Bake pancakes and let the children choose
what goes on top. Draw a map of the flat, hide something small, and mark the place with a cross.

Dear Ms Hansen, thank you for your letter. We have received the parcel, but one of the four chairs has a broken leg.
Could you please send us another one, or tell us where we may have it repaired? With kind regards, Paul Weber.
"""


def long_lengths(windows: Sequence[int | None], max_positions: int | None, *, tiled: bool = False) -> tuple[int, ...]:
    """Return the lengths `LONG`, adapted to a model, and to kernels that work in tiles if `tiled`.

    The longest document exceeds every sliding window that is not too wide. None exceeds a table of learned positions.
    """
    outgrown = [window + 3 for window in windows if window and window < _WIDEST]
    wanted = [_TILED.get(i, length) if tiled else length for i, length in enumerate(LONG)]
    lengths = tuple(max([length, *outgrown]) if i == _LONGEST else length for i, length in enumerate(wanted))
    return tuple(min(length, max_positions or length) for length in lengths)


def draw_shapes(seed: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Draw more arrangements of documents of `LONG`: seven in a row, four in two rows, and several in several rows."""
    generator = torch.Generator().manual_seed(seed)
    seven, four, more = ([_SMALL[i] for i in torch.randperm(len(_SMALL), generator=generator)] for _ in range(3))
    rows = _ROWS[int(torch.randint(len(_ROWS), (), generator=generator))]
    number = int(torch.randint(8, len(_SMALL) + 1, (), generator=generator))
    return {
        "seven documents": (tuple(seven[:7]),),
        "two rows": (tuple(four[:2]), tuple(four[2:4])),
        f"{number} documents in {rows} rows": tuple(tuple(more[row:number:rows]) for row in range(rows)),
    }


def replacements(documents: int) -> list[tuple[bool, ...]]:
    """Return for each of a few runs the documents that it replaces; the first run replaces none.

    For every two documents there are two runs with the same second document, but another first one: each document is
    replaced in its own set of the later runs, for 5 documents in 4 runs {1}, {2}, {3}, {1, 2} and {1, 3}, and no two
    sets divide the runs in the same way.
    """
    # For 5 documents 2 ** 3 > 5, so there are 4 runs, and the first one replaces nothing.
    runs = next(n for n in count(2) if 2 ** (n - 1) > documents)
    sets = [set(members) for size in range(1, runs) for members in combinations(range(1, runs), size)]
    return [tuple(run in members for members in sets[:documents]) for run in range(runs)]


def alternating(documents: int) -> list[tuple[bool, ...]]:
    """Return the documents that three runs replace to find leaks of neighbours: none, every second, the others."""
    even = tuple(place % 2 == 0 for place in range(documents))
    return [(False,) * documents, even, tuple(not replaced for replaced in even)]


def losses(documents: int, runs: int) -> list[list[int]]:
    """Return for each run the documents that have a loss.

    For every two documents some run has a loss of the first and none of the second: each document has a loss in its
    own half of the runs, and no such half contains another (Sperner).
    """
    # 4 runs have 6 halves. Documents 0, 1, 2 get {0, 1}, {0, 2}, {0, 3}.
    sets = list(islice(combinations(range(runs), runs // 2), documents))
    if len(sets) < documents:
        raise ValueError(f"{runs} runs tell {len(sets)} documents apart, not {documents}.")
    return [[document for document, members in enumerate(sets) if run in members] for run in range(runs)]


def known_tokens(documents: Sequence[Sequence[int]] | None, processing_class: Any, vocabulary: int) -> torch.Tensor:
    """Return token ids `(n,)` of the user's documents, or of a text in the tokenizer's tokens; none without either."""
    if documents is None and processing_class is not None:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        documents = [tokenizer(_TEXT, add_special_tokens=False)["input_ids"]]
    ids = [torch.as_tensor(document, dtype=torch.long) for document in documents or ()]
    known = torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)
    return known[(known >= 0) & (known < vocabulary)]


def draw_documents(
    lengths: Sequence[int], known: torch.Tensor, vocabulary: int, seed: int
) -> tuple[Documents, Documents]:
    """Return documents of these lengths, and a replacement for each.

    They are cut one after the other from the known tokens, or random if there are none, or if replacements would equal
    their documents too often.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    # Ids begin at 1: 0 is the padding token of many models, and some embed it as zeros.
    random = torch.randint(1, vocabulary, (2, total), generator=generator)
    if len(known):
        # A short text is repeated: if its length divides the total, each replacement would equal its document.
        places = torch.arange(2 * total).add(seed) % len(known)
        found = known[places].view(2, total)
        if float((found[0] != found[1]).float().mean()) >= _OTHERS:
            random = found
    tokens, others = (list(ids.split(list(lengths))) for ids in random)
    for ids, other in zip(tokens, others, strict=True):
        if float((ids != other).float().mean()) < _OTHERS:
            # With a vocabulary of 4 and token 2: draw from 0, 1, 2, then 2 becomes 3. So every token changes.
            other.copy_(torch.randint(0, vocabulary - 1, ids.shape, generator=generator))
            other += (other >= ids).long()
    return tokens, others


def add_templates(tokens: Documents, others: Documents, special: Sequence[int], seed: int) -> None:
    """Let half of the documents begin alike, as templates do, and put special tokens into some, in place.

    They have one to eight first tokens in common, half of them with their replacement, too. No document begins with a
    special token that others do not have there: some models embed it as zeros.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    able = [i for i, ids in enumerate(tokens) if len(ids) >= _TEMPLATED]

    def some(number: int) -> list[int]:
        return [able[i] for i in torch.randperm(len(able), generator=generator)[:number]]

    def below(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    chosen = some(max(2, len(able) // 2))
    beginning = max((tokens[i] for i in chosen), key=len, default=torch.empty(0, dtype=torch.long))[:_ALIKE].clone()
    for place, i in enumerate(chosen):
        common = 1 if place % 2 else 1 + below(min(_ALIKE, len(tokens[i]) // 2))
        tokens[i][:common] = beginning[:common]
        if place % 4 < 2:
            others[i][:common] = beginning[:common]
    for token in special:
        for i in some(_WITH_SPECIAL):
            for ids in (tokens[i], others[i]):
                ids[1 + below(len(ids) - 1)] = token
