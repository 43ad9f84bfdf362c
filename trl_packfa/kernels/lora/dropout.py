"""Dropout of the inputs of LoRA adapters: one mask for each layer.

torch draws a mask as a whole: on a CPU it is, bit for bit, the mask that PEFT draws from the same state. On CUDA a
Triton kernel draws the masks of several layers as bits, from a seed that torch draws. No mask is kept: the backward
draws it again, from the state that the generator had before the forward, or from the seed.

Shape letters: T tokens, D input features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...autocast import HALF
from ..random_states import random_state
from . import launches
from .projections import Projection

# For each layer, the features to keep `(T, D)`, bool; `None` if it has no dropout now. Or the bits of adapted layers.
Masks = Sequence[torch.Tensor | None] | torch.Tensor


class Dropout:
    """The dropout of layers with one input. Make it directly before the forward draws."""

    def __init__(self, projections: Sequence[Projection], device: torch.device, dtype: torch.dtype) -> None:
        self.rates, self.device = [p.dropout if p.draws else 0.0 for p in projections], device
        adapted = [(p.dropout, p.draws, p.scaling, len(p.lora_A)) for p in projections if p.lora_A is not None]
        # Where nothing is drawn, evaluation and the check run the kernels of training, with masks that keep all.
        by_bits = len(set(adapted)) == 1 and adapted[0][0] > 0 and dtype in HALF and launches.runs_on(device)
        fits = by_bits and adapted[0][-1] <= launches.MOST_RANKS and len(adapted) <= launches.MOST_LAYERS
        self._by_bits = (len(adapted), adapted[0][0]) if fits else None  # number of layers, and their rate
        self._seed: torch.Tensor | None = None
        self._state = random_state(device) if any(self.rates) and self._by_bits is None else None

    def draw(self, tokens: int, features: int) -> Masks:
        """Draw the masks of a forward."""
        if self._by_bits is None:
            return self._draw((tokens, features), None)
        if any(self.rates):
            self._seed = torch.randint(2**63 - 1, (1,), device=self.device)
        return self.draw_again(tokens, features)

    def draw_again(self, tokens: int, features: int) -> Masks:
        """Draw the same masks again, from the seed or from a generator of its own."""
        if self._by_bits is not None:
            layers, rate = self._by_bits
            if self._seed is None:
                return launches.all_bits(layers, tokens, features, self.device)
            return launches.draw_bits(self._seed, layers, tokens, features, rate)
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
