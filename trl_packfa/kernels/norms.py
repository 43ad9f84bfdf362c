"""Llama's RMSNorm by Liger's kernel on CUDA, and outputs of norms that a backward computes again.

They are computed from what the norm keeps for its own backward. Fused LoRA would keep a norm's output beside the
norm's input. That is as much memory, for a computation of one pass. Where only gradients of `lora_A` need the output,
they are computed from the norm's input and [`Scales`] in that pass' place.

Shape letters: T tokens, D normalized features.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..layout.call_context import current_call
from ..override import Override, computes_as
from .liger import lies_on_cuda, liger_kernels, norm_by_liger, norm_on_cuda

# From `(..., D)` and a weight `(D,)` to the norm's output and the factors of rows `(T,)`.
_Norm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Source(NamedTuple):
    """The tensors that a norm's output was made of, and the function that makes it again."""

    hidden: torch.Tensor
    weight: torch.Tensor
    rates: torch.Tensor  # factors of rows `(T,)`, float32
    norm: _Norm
    versions: tuple[int, int]  # of the output and of `hidden`


class Scales(NamedTuple):
    """Factors by which a norm's output differs from its input."""

    rows: torch.Tensor  # `(T, 1)`, float32
    features: torch.Tensor  # `(D,)`


# Of the outputs that are alive. An attribute of a tensor would be saved with it.
_SOURCES: MutableMapping[torch.Tensor, Source] = WeakTensorKeyDictionary()


def run_norm(norm: _Norm, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a norm's output, and note how it was made."""
    normed, rates = norm(hidden, weight)
    if torch.is_grad_enabled():
        _SOURCES[normed] = Source(hidden.detach(), weight, rates, norm, (normed._version, hidden._version))
    return normed


def has_norm_kernel(module: nn.Module) -> bool:
    """Tell whether Liger has a kernel for a module: it computes Llama's RMSNorm, and is or may be moved to CUDA.

    Gemma's RMSNorm has another forward, which casts elsewhere and adds one to the weight. It does not count.
    """
    return (
        liger_kernels() is not None
        and computes_as(module, LlamaRMSNorm.forward)
        and all(weight.device.type == "cpu" or lies_on_cuda(weight) for weight in module.parameters())
    )


class RMSNormOverride(Override):
    """An RMSNorm that Liger computes in packed calls on CUDA."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the norm's forward on `(..., D)`."""
        norm: Any = self.module
        kernels = norm_on_cuda(hidden_states, norm.weight)
        # Graphs come no further than here, and cannot read the context.
        if kernels is None or current_call().layout is None:
            return self.call_original(hidden_states)
        return run_norm(partial(norm_by_liger, kernels, norm.variance_epsilon), hidden_states, norm.weight)


def source_of(x: torch.Tensor) -> Source | None:
    """Return what `x` was made of, `None` if it is no norm's output or must be kept itself."""
    source = _SOURCES.get(x)
    if source is None or source.versions != (x._version, source.hidden._version):  # overwritten since
        return None
    # Under hooks on saved tensors it is kept: a checkpoint computes it again anyway, and TRL's offloading cannot move
    # what two functions save.
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    return None if hooks is None or hooks(True) else source  # torch 2.7 does not tell


def save_input(ctx: Any, x_TD: torch.Tensor, source: Source | None, *others: torch.Tensor | None) -> None:
    """Save the input of an autograd function, or what it was made of, and other tensors."""
    ctx.norm = None if source is None else source.norm
    ctx.save_for_backward(*((x_TD, None, None) if source is None else source[:3]), *others)


def saved_input(ctx: Any, dtype: torch.dtype) -> tuple[torch.Tensor, Scales | None, list[torch.Tensor]]:
    """Return the input `(T, D)` for products in `dtype`, and the other tensors that [`save_input`] has saved.

    With [`Scales`] the input lacks these factors.
    """
    x, weight, rates, *others = ctx.saved_tensors
    if weight is None:
        return x, None, others
    # In float16, gradients times the factors of rows may overflow. In float32, other products need the output, too.
    if dtype != torch.bfloat16:
        return ctx.norm(x, weight)[0].flatten(0, -2), None, others
    return x.flatten(0, -2), Scales(rates[:, None], weight), others
