"""RMSNorm by Liger's kernel, for models with Llama's RMSNorm.

Shape letter: D normalized features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...layout.call_context import current_layout
from ...runtime.override import Override, computes_as
from .library import lies_on_cuda, liger_kernels, takes


def is_rms_norm_on_cuda(module: nn.Module) -> bool:
    """Tell whether a module computes Llama's RMSNorm, its weight is on CUDA, and Liger is available.

    Gemma's RMSNorm has another forward, which casts elsewhere and adds one to the weight. It does not count.
    """
    return (
        computes_as(module, LlamaRMSNorm.forward)
        and all(map(lies_on_cuda, module.parameters()))
        and liger_kernels() is not None
    )


class LigerRMSNormOverride(Override):
    """An RMSNorm that packed calls compute in one pass over memory forward and one backward."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the norm's forward on `(..., D)`."""
        if torch.compiler.is_compiling() or current_layout() is None:
            return self.call_original(hidden_states)
        norm: Any = self.module
        kernels = liger_kernels()
        # Both must have one dtype. With a wider weight, Llama's result has the weight's dtype, Liger's the input's.
        if kernels is None or not takes(hidden_states, norm.weight):
            return self.call_original(hidden_states)
        # "llama" casts as Llama does: float32 up to the weight, then the input's dtype. In place would overwrite the
        # incoming gradient, which a residual also reads.
        options = (norm.variance_epsilon, 0.0, "llama", False)
        return kernels.rms_norm.apply(hidden_states, norm.weight, *options)  # type: ignore[return-value]
