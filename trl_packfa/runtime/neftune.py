"""NEFTune's noise (arXiv 2310.05914) as strong as in the padded run.

transformers draws it from a range that narrows with the row: `alpha / sqrt(L * D)`. A packed row is longer than the
rows it replaces, so each example's noise is scaled by the row that it would have been padded to. Every trainer gets it
from here: rows that are packed from the trainer, padded rows without their pads from the backbone's own call.

Shape letters: B rows, L row length, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from .compile import outside_of_graphs


class EmbeddingNoise:
    """A forward hook of the embedding that takes the place of transformers' own while a packed run trains.

    Args:
        alpha (`float`):
            `neftune_noise_alpha`.

    Attributes:
        lengths (`torch.Tensor` or `None`): for each token of the next call the length of its padded row, `(B, L)`, or
            one for all; `None` for a batch that is not packed.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.lengths: torch.Tensor | None = None

    @outside_of_graphs
    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """The embeddings `(B, L, D)`, noisy in training."""
        if not module.training:
            return output
        width = output.shape[-1]
        # A batch that is not packed: the row's own length, as transformers has it.
        lengths = output.new_full(output.shape[:-1], output.shape[1]) if self.lengths is None else self.lengths
        widest = self.alpha / (lengths.to(output.device).float() * width).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * widest[..., None].to(output.dtype)


@contextmanager
def noise_of_padded_rows(backbone: nn.Module, noise: EmbeddingNoise, lengths: torch.Tensor) -> Iterator[None]:
    """Draw transformers' noise for padded rows of these `lengths` in a `with` block, where the backbone's embedding
    has that noise at all.

    Args:
        backbone (`torch.nn.Module`):
            Its embedding is called inside.
        noise ([`EmbeddingNoise`]):
            Stands in the place of transformers' hook; the same one for every call of a model, as compiled graphs are
            told apart by it.
        lengths (`torch.Tensor`):
            As of [`EmbeddingNoise`].
    """
    embedding: Any = backbone.get_input_embeddings()  # type: ignore[operator]  # of a transformers model
    slots = [key for key, hook in embedding._forward_hooks.items() if hook is neftune_post_forward_hook]
    if slots:
        noise.alpha, noise.lengths = embedding.neftune_noise_alpha, lengths
        embedding._forward_hooks.update(dict.fromkeys(slots, noise))
    try:
        yield
    finally:
        embedding._forward_hooks.update(dict.fromkeys(slots, neftune_post_forward_hook))
