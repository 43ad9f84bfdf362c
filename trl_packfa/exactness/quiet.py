"""A model as it trains, without its noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..quantized import unconverted


@contextmanager
def quiet(model: nn.Module, *, checkpointing: bool = False) -> Iterator[None]:
    """No dropout, and afterwards every module's mode, every gradient, 4-bit layer and the random state as before.

    With `checkpointing`, layers that are checkpointed in training are here too; nothing else is in training mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = list({parameter.device for parameter, _ in gradients if parameter.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), unconverted(model):
            model.eval()
            for module in model.modules() if checkpointing else ():
                # The switch of the module itself: its children stay in evaluation mode.
                module.training = bool(getattr(module, "gradient_checkpointing", False))
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
