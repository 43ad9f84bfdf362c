"""Faults in exact models, which a check must see."""

import torch


def wrap(model, name, fault):
    """Put `fault(override, args, kwargs)` in the place of one module's patched forward."""
    module = model.get_submodule(name)
    override = vars(module)["forward"]
    module.forward = lambda *args, **kwargs: fault(override, args, kwargs)
    return model


class HalvesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2
