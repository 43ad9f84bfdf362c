"""`silu(gate) * up` by Liger's kernel: one pass over memory forward, and one backward that overwrites its inputs.

Shape letters: D model features, I features inside an MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from ...layout.call_context import current_layout
from ...runtime.override import Override, computes_as, runs_own_forward
from .library import LigerKernels, lies_on_cuda, liger_kernels, takes

_SILU = (nn.SiLU, SiLUActivation)


def multiplies_by_liger(mlp: Any, x: torch.Tensor) -> bool:
    """Tell whether Liger can compute the product inside a gated MLP for an input `(..., D)`."""
    plain = type(mlp.act_fn) in _SILU and runs_own_forward(mlp.act_fn)
    return plain and lies_on_cuda(x) and liger_kernels() is not None


def is_swiglu_on_cuda(module: nn.Module) -> bool:
    """Tell whether a module computes Llama's MLP with SiLU, is on CUDA, and Liger is available."""
    weight = next(module.parameters(), None)
    return computes_as(module, LlamaMLP.forward) and weight is not None and multiplies_by_liger(module, weight)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * up` of `(..., I)`. [`takes`] must accept both tensors."""
    return _kernels().swiglu_forward(gate, up)[-1]


def swiglu_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *, overwrites: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up from the gradient of [`swiglu`]. `overwrites` allows to overwrite both."""
    pair = (gate, up) if overwrites else (gate.clone(), up.clone())
    return _kernels().swiglu_backward(*pair, grad.contiguous())


def _kernels() -> LigerKernels:
    kernels = liger_kernels()
    assert kernels is not None
    return kernels


def is_last_backward() -> bool:
    """Tell whether the running backward frees its saved tensors, so that they may be overwritten."""
    # With `retain_graph=True` another backward reads them again. AOTAutograd makes the same test before it reuses
    # buffers.
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    asks = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return asks is not None and not asks()


class _SwiGLU(Function):
    """Autograd function of `silu(gate) * up` for `(..., I)`. It saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return swiglu_gradients(gate, up, grad, overwrites=is_last_backward())


def gated_by_liger(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute Llama's MLP of `(..., D)`, with the product by Liger if its kernels accept the tensors."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _SwiGLU.apply(gate, up) if takes(gate, up) else mlp.act_fn(gate) * up
    return mlp.down_proj(product)


class SwiGLUOverride(Override):
    """A gated MLP without adapters; Liger computes its product in packed calls."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the MLP's forward on `(..., D)`."""
        if torch.compiler.is_compiling() or current_layout() is None or not multiplies_by_liger(self.module, x):
            return self.call_original(x)
        return gated_by_liger(self.module, x)
