"""Where the examples of a packed micro-batch come from: what a loss, or noise, that depends on the whole of a padded
micro-batch needs to know once a step is cut anew.

Shape letters: B rows, L row length, T tokens (B * L), G padded micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime.boundaries import layout_of

# The key of a micro-batch's `Origins`, popped before the model is called.
ORIGINS = "trl_packfa_origins"


@dataclass(frozen=True)
class Origins:
    """The padded micro-batches that a packed micro-batch is made of, and whose each example is.

    Args:
        sizes (`tuple[int, ...]`):
            Tokens of each example, as they lie in the rows; what follows them is padding.
        groups (`tuple[int, ...]`):
            For each example the number of its padded micro-batch, below G.
        tokens (`tuple[int, ...]`):
            True tokens of each of the G padded micro-batches, on all ranks together.
        longest (`tuple[int, ...]`):
            Tokens of each one's longest example.
        share (`float`, *optional*, defaults to `1.0`):
            What the sum of G losses is multiplied with, for the mean over a step's micro-batches and ranks to be the
            mean over its padded ones.
        shared (`bool`, *optional*, defaults to `False`):
            Whether other ranks may hold examples of the same padded micro-batches at the same time.
    """

    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    tokens: tuple[int, ...]
    longest: tuple[int, ...]
    share: float = 1.0
    shared: bool = False

    @classmethod
    def of_whole(cls, inputs: Mapping[str, Any]) -> Origins:
        """Of a packed batch that holds the examples of one padded micro-batch."""
        layout = inputs.get("packed_layout") or layout_of(dict(inputs))
        if layout is None:  # one document, as another's collator sends it
            sizes: tuple[int, ...] = (inputs["input_ids"].numel(),)
        else:
            sizes = layout.lengths[:-1] if layout.padding else layout.lengths
        return cls(sizes, (0,) * len(sizes), (sum(sizes),), (max(sizes, default=0),))

    def of_tokens(self, count: int, device: torch.device) -> torch.Tensor:
        """For each of `count` tokens the number of its padded micro-batch, G for padding; `(T,)`, int64."""
        return self.spread(self.groups, count, device, padding=len(self.tokens)).long()

    def spread(self, values: Sequence[float], count: int, device: torch.device, *, padding: float) -> torch.Tensor:
        """A value of each example as one of each of `count` tokens, `(T,)`."""
        # Sizes (2, 1), values (7, 9) and 4 tokens: [7, 7, 9, padding].
        sizes = torch.tensor([*self.sizes, count - sum(self.sizes)])
        return torch.repeat_interleave(torch.tensor([*values, padding]), sizes, output_size=count).to(device)


def origins_of_steps(
    dealt: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray, groups: np.ndarray, *, rank: int
) -> list[Origins]:
    """The origins of a rank's micro-batches.

    Args:
        dealt (`list[list[list[int]]]`):
            For each rank the examples of each of its micro-batches.
        lengths (`np.ndarray`), groups (`np.ndarray`):
            Tokens of each example and the number of its padded micro-batch.
        rank (`int`):
            Whose.
    """
    _, numbers = np.unique(groups, return_inverse=True)
    tokens, longest = np.bincount(numbers, weights=lengths).astype(np.int64), np.zeros(numbers.max() + 1, np.int64)
    np.maximum.at(longest, numbers, lengths)
    # 8 padded micro-batches in 2 rounds on 2 ranks: TRL averages over rounds and ranks, by 4, where 8 is meant: 4 / 8.
    share = len(dealt[0]) * len(dealt) / len(tokens)
    found = []
    for index, part in enumerate(dealt[rank]):
        # Numbered anew among those that any rank runs now: of 5 and 9, the examples of 9, 5, 9 are of 1, 0, 1.
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
