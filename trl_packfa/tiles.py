"""Logits of an LM head, some positions at a time, and what a loss needs of them.

Shape letters: D model dim, V vocabulary; n positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from .precision import HALF, autocast_dtype

# Logits of a tile. Products of more positions are the faster, up to these 64 MB of float32, which are made once and
# used for every tile; in half precision each tile needs float32 copies too, which glibc maps afresh above 32 MB.
_TILE, _TILE_IN_HALF = 16 * 1024**2, 4 * 1024**2
# Below it a float32 probability may have lost digits; its logarithm is taken of the logits.
_UNLIKELY = 1e-30
# Positions of a tile at least: fewer would read the head's weight too often.
_FEWEST = 128


class Transform(NamedTuple):
    """What a model does to its head's output: multiply, then softly cap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Transform:
        """As transformers' models do by their configs; what a config does not say, the comparison with the model's
        own logits finds ([`~fused_head.ensure_own_loss`])."""
        text = config.get_text_config()
        divisor = getattr(text, "logits_scaling", None)
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None)
        return cls(scale or (1 / divisor if divisor else 1.0), getattr(text, "final_logit_softcapping", None))


def tile_size(dtype: torch.dtype, words: int) -> int:
    """Positions whose logits are computed at a time."""
    return max((_TILE_IN_HALF if dtype in HALF else _TILE) // words, _FEWEST)


class Tiles:
    """Logits of some positions at a time, `(slice, (n, V))`; a tile is valid until the next."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transform: Transform,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype or autocast_dtype(hidden) or hidden.dtype
        self.hidden, self.weight, self.transform = hidden, weight.to(self.dtype), transform
        self.bias = None if bias is None else bias.to(self.dtype)
        self.size = tile_size(self.dtype, len(weight))

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        buffer = self.hidden.new_empty((min(self.size, len(self.hidden)), len(self.weight)), dtype=self.dtype)
        for start in range(0, len(self.hidden), self.size):
            part = slice(start, min(start + self.size, len(self.hidden)))
            logits = torch.mm(self.hidden[part].to(self.dtype), self.weight.t(), out=buffer[: part.stop - start])
            if self.bias is not None:
                logits.add_(self.bias)
            yield part, self._transformed(logits)

    def again(self, part: slice, which: torch.Tensor) -> torch.Tensor:
        """Logits of some positions of a tile, bool `(n,)`, once more, `(any number, V)`, float32."""
        logits = self.hidden[part][which].to(self.dtype) @ self.weight.t()
        return self._transformed(logits if self.bias is None else logits.add_(self.bias)).to(torch.float32)

    def _transformed(self, logits: torch.Tensor) -> torch.Tensor:
        scale, softcap = self.transform
        if scale != 1.0:
            logits.mul_(scale)
        return logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)


class Tile:
    """What one tile of logits `(n, V)`, with targets `(n, 1)`, comes to; float32 logits are overwritten.

    A pass over a tile costs 2 to 8 % of its product with a head of 512 features, so there is one: probabilities.

    Args:
        tiles (`Tiles`), part (`slice`), logits (`torch.Tensor`): where it comes from, and what of it.
        target (`torch.Tensor`): int64 words.
        measures (`bool`): whether entropy and accuracy are computed.

    Attributes:
        log_prob, entropy, is_top1 (`torch.Tensor`): `(n,)`, the last two if `measures`.
    """

    def __init__(
        self, tiles: Tiles, part: slice, logits: torch.Tensor, target: torch.Tensor, *, measures: bool = False
    ) -> None:
        self.target, self.transform = target, tiles.transform
        softcap = self.transform.softcap
        self.curve = None if softcap is None else 1 - (logits / softcap).square()
        if measures:
            self.is_top1 = _is_first_of(logits, target, logits.amax(-1, keepdim=True))
        wide = logits.to(torch.float32)
        self.prob = torch.softmax(wide, -1, out=wide)
        chosen = self.prob.gather(-1, target)[:, 0]
        self.log_prob = chosen.log()
        if (unlikely := chosen < _UNLIKELY).any():
            again = torch.log_softmax(tiles.again(part, unlikely), -1)
            self.log_prob[unlikely] = again.gather(-1, target[unlikely])[:, 0]
        if measures:
            self.entropy = torch.special.entr(self.prob).sum(-1)

    def slope(self) -> torch.Tensor:
        """Derivative of the target's negative log-probability by the head's output, `(n, V)`, float32; overwrites
        the probabilities."""
        by = self.prob.scatter_add_(-1, self.target, torch.full_like(self.target, -1.0, dtype=self.prob.dtype))
        if self.curve is not None:
            by.mul_(self.curve)
        return by.mul_(self.transform.scale) if self.transform.scale != 1.0 else by


def _is_first_of(logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Whether `argmax` `(n,)` is the target: a slow pass, so only of rows where the target has the largest logit."""
    found = (logits.gather(-1, target) == top)[:, 0]
    found[found.clone()] = logits[found].argmax(-1) == target[found, 0]
    return found
