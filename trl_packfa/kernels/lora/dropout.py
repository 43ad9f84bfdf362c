"""Dropout of the inputs of LoRA adapters: one mask for each layer, as PEFT draws them.

A mask is drawn as a whole: on a CPU it is, bit for bit, the mask that PEFT draws from the same state. No mask is kept:
the backward draws it again, from the state that the generator had before the forward.

Shape letters: T tokens, D input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..random_states import random_state
from .projections import Projection

# For each layer, the features to keep `(T, D)`, bool; `None` if it has no dropout now.
Masks = Sequence[torch.Tensor | None]


class Dropout:
    """The dropout of layers with one input. Make it directly before the forward draws."""

    def __init__(self, projections: Sequence[Projection], device: torch.device) -> None:
        self.rates, self.device = [p.dropout if p.draws else 0.0 for p in projections], device
        self._state = random_state(device) if any(self.rates) else None

    def draw(self, tokens: int, features: int) -> Masks:
        """Draw the masks of a forward."""
        return self._draw((tokens, features), None)

    def draw_again(self, tokens: int, features: int) -> Masks:
        """Draw the same masks again, from a generator of its own."""
        generator = None
        if self._state is not None:
            generator = torch.Generator(self.device)
            generator.set_state(self._state)
        return self._draw((tokens, features), generator)

    def _draw(self, shape: tuple[int, int], generator: torch.Generator | None) -> Masks:
        return [
            torch.empty(shape, dtype=torch.bool, device=self.device).bernoulli_(1 - rate, generator=generator)
            if rate
            else None
            for rate in self.rates
        ]
