"""Measure how far rounding alone moves a model: run it again with every value changed by up to a last place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..autocast import multiplies_in_tf32

# Modules that return their input.
_KEEP = (nn.Identity, nn.Dropout)


@contextmanager
def last_places_off(model: nn.Module, *, by: float = 1.0) -> Iterator[None]:
    """Change the output of every module by up to `by` last places, at random, inside a `with` block.

    Another kernel, batch shape or order of a sum may change it by as much. The last place is that of the dtype that
    the module computes in: a 4-bit layer multiplies in half precision, whatever dtype it returns.

    Fused kernels leave a module with a hook to the model's own code. With `by=0` that is all that changes, so two runs
    under this function differ by rounding alone, even if a kernel is wrong.
    """

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) and output else output
        if not by or not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return None
        place = by * _last_place(module, first)
        # x + x * u, with u within a last place. The gradient of x gets the same factor: the backward rounds, too.
        moved = torch.addcmul(first, first, torch.empty_like(first).uniform_(-place, place))
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    with ExitStack() as hooks:
        for module in filter(_computes, model.modules()):
            hooks.enter_context(module.register_forward_hook(move))
        yield


def _computes(module: nn.Module) -> bool:
    """Tell whether a module computes something itself, and does not only call other modules."""
    is_smallest = next(module.children(), None) is None
    return (is_smallest or next(module.parameters(recurse=False), None) is not None) and not isinstance(module, _KEEP)


def _last_place(module: nn.Module, output: torch.Tensor) -> float:
    """Return the relative distance of one number from the next, in the coarsest dtype that the module computes in."""
    dtypes = {output.dtype, *(p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())}
    computes_in = getattr(module, "compute_dtype", None)
    if isinstance(computes_in, torch.dtype) and computes_in.is_floating_point:
        dtypes.add(computes_in)
    # bitsandbytes' LLM.int8 casts activations to float16 before it quantizes them.
    if type(module).__name__ == "Linear8bitLt":
        dtypes.add(torch.float16)
    if torch.float32 in dtypes and _multiplies(module) and multiplies_in_tf32(output.device):
        dtypes.add(torch.float16)  # as coarse as TF32
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _multiplies(module: nn.Module) -> bool:
    """Tell whether a module multiplies matrices."""
    return not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False))
