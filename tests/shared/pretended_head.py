"""TRL's torch code in the place of its Triton kernels of the LM head; it has their arguments in their order."""

import inspect

from trl.kernels import chunked_logprob

from trl_packfa.kernels.lm_head import chunked, kernels
from trl_packfa.kernels.lm_head.kernels import ScoringKernels


class InTorch:
    """A function that is launched as a Triton kernel is, with arguments by name."""

    def __init__(self, kernel, function):
        names = getattr(kernel, "arg_names", None)  # of functions that Triton compiles
        self.names = list(inspect.signature(kernel).parameters) if names is None else names
        self.function = function

    def __getitem__(self, grid):
        return lambda **given: self.function(*[given[name] for name in self.names])


def in_torch(fold=chunked_logprob._forward_tile, slope=chunked_logprob._backward_tile):
    return ScoringKernels(
        InTorch(chunked_logprob._forward_kernel, fold), InTorch(chunked_logprob._backward_kernel, slope)
    )


def is_frozen(weight, bias=None):
    return not weight.requires_grad


def pretend_kernels(monkeypatch, **functions):
    """Make a frozen head on a CPU take the code that runs on CUDA."""
    monkeypatch.setattr(kernels, "scoring_kernels", lambda: in_torch(**functions))
    for name in ("serves", "is_cheaper"):
        monkeypatch.setattr(chunked, name, is_frozen)
