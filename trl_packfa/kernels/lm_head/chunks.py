"""Logits of an LM head in chunks of positions, and the scores of a chunk.

Shape letters: D model dim, V vocabulary; n positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from ...runtime.autocast import HALF, autocast_dtype

# Number of logits of a chunk. Larger products are faster, up to these 64 MB of float32; one buffer serves all chunks.
# In half precision each chunk also needs float32 copies, and glibc allocates blocks above 32 MB anew each time.
_TILE, _TILE_IN_HALF = 16 * 1024**2, 4 * 1024**2
# Smallest number of positions of a chunk; smaller chunks would read the head's weight too often.
_FEWEST = 128


class Transform(NamedTuple):
    """The change of a head's output before the softmax: a factor, then a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Transform:
        """Read factor and softcap from a config of transformers.

        [`~fused_head.ensure_own_loss`] compares with the model's own logits, and so finds changes that the config
        does not name.
        """
        text = config.get_text_config()
        divisor = getattr(text, "logits_scaling", None)
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None)
        return cls(scale or (1 / divisor if divisor else 1.0), getattr(text, "final_logit_softcapping", None))


def positions_per_chunk(dtype: torch.dtype, words: int) -> int:
    """Return the number of positions of a chunk, for logits over `words` tokens of the vocabulary."""
    return max((_TILE_IN_HALF if dtype in HALF else _TILE) // words, _FEWEST)


class Chunks:
    """An iterable over chunks of logits, `(slice, (n, V))`. The next chunk overwrites the last one."""

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
        self.size = positions_per_chunk(self.dtype, len(weight))

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        scale, softcap = self.transform
        buffer = self.hidden.new_empty((min(self.size, len(self.hidden)), len(self.weight)), dtype=self.dtype)
        for start in range(0, len(self.hidden), self.size):
            part = slice(start, min(start + self.size, len(self.hidden)))
            logits = torch.mm(self.hidden[part].to(self.dtype), self.weight.t(), out=buffer[: part.stop - start])
            if self.bias is not None:
                logits.add_(self.bias)
            if scale != 1.0:
                logits.mul_(scale)
            yield part, logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)


class Chunk:
    """The scores of one chunk of logits `(n, V)` with targets `(n, 1)`. It overwrites float32 logits.

    A pass over a chunk costs 2 to 8 % of its product with a head of 512 features, so there are few passes.

    Attributes:
        log_prob, entropy, is_top1 (`torch.Tensor`): `(n,)`, the last two if `measures`.
    """

    def __init__(
        self, logits: torch.Tensor, target: torch.Tensor, transform: Transform, *, measures: bool = False
    ) -> None:
        self.target, self.transform = target, transform
        self.curve = None if transform.softcap is None else 1 - (logits / transform.softcap).square()
        shifted, top = logits.to(torch.float32), logits.amax(-1, keepdim=True)
        likeliest = _is_first_of(logits, target, top) if measures else None
        shifted = shifted.sub_(top.to(torch.float32))
        chosen = shifted.gather(-1, target)
        self.exp = shifted.exp() if measures else shifted.exp_()
        self.total = self.exp.sum(-1, keepdim=True)
        self.log_prob = (chosen - self.total.log())[:, 0]
        if likeliest is not None:
            self.is_top1 = likeliest
            mean = torch.linalg.vecdot(self.exp, shifted) / self.total[:, 0]
            self.entropy = self.total[:, 0].log() - mean

    def grad_logits(self) -> torch.Tensor:
        """Return the derivative of the target's log-probability by the head's output, `(n, V)`, float32."""
        by = self.exp.mul_(-1 / self.total)
        by.scatter_add_(-1, self.target, torch.ones_like(self.target, dtype=by.dtype))
        if self.curve is not None:
            by.mul_(self.curve)
        return by.mul_(self.transform.scale) if self.transform.scale != 1.0 else by


def _is_first_of(logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Tell for each row whether the target is the `argmax`, `(n,)`.

    `argmax` is slow, so it runs only on rows in which the target has the largest logit.
    """
    found = (logits.gather(-1, target) == top)[:, 0]
    found[found.clone()] = logits[found].argmax(-1) == target[found, 0]
    return found
