"""`ImageWeights`: the memory and the time of an image patch, as a share of a token's in the text decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...patching.inspect import inner_model, text_decoder

# Edge of a patch in pixels, and channels of an image, for a config that does not say them.
_EDGE, _CHANNELS = 14, 3


@dataclass(frozen=True)
class ImageWeights:
    """The weight of an image patch.

    Args:
        values (`int`): numbers that a processor makes for an image patch: its pixels, in all channels.
        size (`float`): its activations, as a share of a token's in the decoder, at most 1.
        cost (`float`): its operations, as a share of a token's in the decoder.
    """

    values: int
    size: float
    cost: float

    @classmethod
    def of(cls, model: Any) -> ImageWeights:
        """Read the weights from the shape of a model, as it will train. All are 0 without a vision tower."""
        decoder, head = text_decoder(model), model.get_output_embeddings()
        if decoder is None:
            return cls(1, 0.0, 0.0)
        inside = {module for module in decoder.modules() if isinstance(module, nn.Linear)}
        others = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside and m is not head]
        trains = any(weight.requires_grad for module in others for weight in module.parameters())
        outputs, in_decoder = [m.out_features for m in others], sum(m.out_features for m in inside)
        # A tower that is not trained keeps the outputs of one layer at a time, and has no backward.
        kept = sum(outputs) if trains else max(outputs, default=0)
        passes = 1.0 if trains else 1 / 3
        return cls(
            values=_patch_values(inner_model(model).config),
            size=min(1.0, kept / max(in_decoder, 1)),
            cost=passes * _products(others) / max(_products(inside), 1),
        )

    def count(self, batch: dict[str, Any]) -> float:
        """Count the image patches of a batch, those that only fill it up included."""
        pixels = (value for key, value in batch.items() if key.startswith("pixel_values"))
        return sum(value.numel() for value in pixels if isinstance(value, torch.Tensor)) / self.values


def _products(modules: Any) -> int:
    return sum(module.in_features * module.out_features for module in modules)


def _patch_values(config: Any) -> int:
    vision = getattr(config, "vision_config", None)  # composites name their parts differently
    edge = getattr(vision, "patch_size", None) or _EDGE
    height, width = edge if isinstance(edge, (list, tuple)) else (edge, edge)
    channels = next(
        (n for name in ("num_channels", "in_channels", "in_chans") if (n := getattr(vision, name, None))), _CHANNELS
    )
    return height * width * channels * (getattr(vision, "temporal_patch_size", None) or 1)
