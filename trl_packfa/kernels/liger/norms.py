"""RMSNorm by Liger, where a model's is Llama's.

Shape letter: D normalized features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...runtime.context import current_layout
from ...runtime.override import Override, computes_as
from .library import lies_on_cuda, liger_kernels, takes


def is_rms_norm_on_cuda(module: nn.Module) -> bool:
    """Whether a module's forward is Llama's RMSNorm, its weight on CUDA, and Liger there to compute it.

    Gemma's, which casts elsewhere and adds one to its weight, has another forward and is not taken.
    """
    return (
        computes_as(module, LlamaRMSNorm.forward)
        and all(map(lies_on_cuda, module.parameters()))
        and liger_kernels() is not None
    )


class LigerRMSNormOverride(Override):
    """An RMSNorm of packed calls, in one pass over memory forward and one backward."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm's forward, of `(..., D)`."""
        if torch.compiler.is_compiling() or current_layout() is None:
            return self.call_original(hidden_states)
        norm: Any = self.module
        kernels = liger_kernels()
        # Of one dtype: where a weight is wider, Llama's result is as wide as that, and Liger's as its input.
        if kernels is None or not takes(hidden_states, norm.weight):
            return self.call_original(hidden_states)
        # Cast as Llama's: float32 up to the weight, then the input's dtype. Not in place, which would overwrite the
        # gradient that comes in, and a residual reads that, too.
        options = (norm.variance_epsilon, 0.0, "llama", False)
        return kernels.rms_norm.apply(hidden_states, norm.weight, *options)  # type: ignore[return-value]
