"""NEFTune's noise (arXiv 2310.05914), as strong as in the padded run.

transformers draws it from a range that is smaller for longer rows: `alpha / sqrt(L * D)`. A packed row is longer than
the rows that it replaces, so each example's noise is scaled by the length of its padded row: the trainer's, or that of
the padded row in the backbone's call.

Shape letters: B rows, L row length, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from ..compile import outside_of_graphs
from ..layout.padded_rows import PaddedRows


class EmbeddingNoise:
    """Forward hook of the embedding that replaces transformers' own hook while a packed run trains."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha  # `neftune_noise_alpha`
        # For each token of the next call the length of its padded row, `(B, L)`, or one length for all tokens; `None`
        # for a batch that is not packed.
        self.lengths: torch.Tensor | None = None

    @outside_of_graphs
    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `(B, L, D)`, with noise in training."""
        if not module.training:
            return output
        width = output.shape[-1]
        # A batch that is not packed uses the row's own length, as transformers does.
        lengths = output.new_full(output.shape[:-1], output.shape[1]) if self.lengths is None else self.lengths
        widest = self.alpha / (lengths.to(output.device).float() * width).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * widest[..., None].to(output.dtype)


@contextmanager
def noise_of_padded_rows(
    backbone: nn.Module, noise: EmbeddingNoise, rows: PaddedRows, device: torch.device
) -> Iterator[None]:
    """Draw the noise for these padded rows in a `with` block, if the backbone's embedding has NEFTune's noise.

    `noise` replaces transformers' hook. It must be the same one for every call of a model, as compiled graphs tell
    hooks apart by identity.
    """
    if not backbone.training:
        yield
        return
    embedding: Any = backbone.get_input_embeddings()  # type: ignore[operator]  # of a transformers model
    slots = [key for key, hook in embedding._forward_hooks.items() if hook is neftune_post_forward_hook]
    if slots:
        noise.alpha, noise.lengths = embedding.neftune_noise_alpha, rows.padded_lengths(device)
        embedding._forward_hooks.update(dict.fromkeys(slots, noise))
    try:
        yield
    finally:
        embedding._forward_hooks.update(dict.fromkeys(slots, neftune_post_forward_hook))
