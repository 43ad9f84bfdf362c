"""`Origins`: the padded micro-batches that the examples of a packed micro-batch are from.

Shape letters: T tokens (B * L), G padded micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..layout.from_call import layout_of

# The key of a micro-batch's `Origins` while it runs. It is removed before the model is called.
ORIGINS = "trl_packfa_origins"


@dataclass(frozen=True)
class Origins:
    """The padded micro-batches of a packed micro-batch's examples.

    Losses that are means over a padded micro-batch (experts' auxiliary loss, pairs) need them to stay the same.
    """

    sizes: tuple[int, ...]  # tokens of each example, in the order of the rows; tokens after them are padding
    groups: tuple[int, ...]  # the number of each example's padded micro-batch, below G
    tokens: tuple[int, ...]  # true tokens of each of the G padded micro-batches, on all ranks together
    longest: tuple[int, ...]  # tokens of each padded micro-batch's longest example
    # Factor for the sum of G losses, with which the mean over a step's micro-batches and ranks is the mean over its
    # padded micro-batches.
    share: float = 1.0
    shared: bool = False  # whether other ranks may hold examples of the same padded micro-batches at the same time

    @classmethod
    def none(cls) -> Origins:
        """Make the origins of a micro-batch that trains nothing."""
        return cls((), (), (), ())

    @classmethod
    def of_whole(cls, inputs: Mapping[str, Any]) -> Origins:
        """Make the origins of a packed batch that holds the examples of exactly one padded micro-batch."""
        layout = inputs.get("packed_layout") or layout_of(dict(inputs))
        if layout is None:  # a user's collator may send a single document without boundaries
            sizes: tuple[int, ...] = (inputs["input_ids"].numel(),)
        else:
            sizes = layout.true_lengths
        return cls(sizes, (0,) * len(sizes), (sum(sizes),), (max(sizes, default=0),))

    def spread(self, values: Sequence[float], ids: torch.Tensor, *, padding: float) -> torch.Tensor:
        """Repeat a value of each example for each of its tokens. `ids` are the batch's; the result has their shape."""
        # For example sizes (2, 1), values (7, 9) and 4 tokens give [7, 7, 9, padding].
        sizes = torch.tensor([*self.sizes, ids.numel() - sum(self.sizes)])
        by_token = torch.repeat_interleave(torch.tensor([*values, padding]), sizes, output_size=ids.numel())
        return by_token.view(ids.shape).to(ids.device)


def origins_of_steps(
    dealt: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray, groups: np.ndarray, *, rank: int
) -> list[Origins]:
    """Return the origins of a rank's micro-batches.

    `dealt` holds, for each rank, the examples of each of its micro-batches; `lengths` and `groups` are the tokens of
    each example and the number of its padded micro-batch.
    """
    _, numbers = np.unique(groups, return_inverse=True)
    tokens, longest = (np.zeros(int(numbers.max()) + 1, dtype=np.int64) for _ in range(2))
    np.add.at(tokens, numbers, lengths)
    np.maximum.at(longest, numbers, lengths)
    # Example: 8 padded micro-batches run in 2 rounds on 2 ranks. TRL averages over rounds and ranks, so it divides by
    # 4 instead of 8. Then the share is 4 / 8.
    share = len(dealt[0]) * len(dealt) / len(tokens)
    found = []
    for index, part in enumerate(dealt[rank]):
        # Number the padded micro-batches that any rank runs now from 0. If they are 5 and 9, examples of 9, 5, 9 get
        # the numbers 1, 0, 1.
        here = np.unique(numbers[[example for other in dealt for example in other[index]]])
        found.append(
            Origins(
                sizes=tuple(lengths[part].tolist()),
                groups=tuple(np.searchsorted(here, numbers[part]).tolist()),
                tokens=tuple(tokens[here].tolist()),
                longest=tuple(longest[here].tolist()),
                share=share,
                shared=len(dealt) > 1,
            )
        )
    return found
