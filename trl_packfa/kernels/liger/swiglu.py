"""`silu(gate) * up` by Liger: in one pass over memory forward, and one backward that writes over its inputs.

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

from ...runtime.context import current_layout
from ...runtime.override import Override, computes_as, runs_own_forward
from .library import LigerKernels, lies_on_cuda, liger_kernels, takes

_SILU = (nn.SiLU, SiLUActivation)


def multiplies_by_liger(mlp: Any, x: torch.Tensor) -> bool:
    """Whether Liger multiplies inside a gated MLP for an input `(..., D)`."""
    plain = type(mlp.act_fn) in _SILU and runs_own_forward(mlp.act_fn)
    return plain and lies_on_cuda(x) and liger_kernels() is not None


def is_swiglu_on_cuda(module: nn.Module) -> bool:
    """Whether a module's forward is Llama's MLP with SiLU, on CUDA, and Liger there to compute it."""
    weight = next(module.parameters(), None)
    return computes_as(module, LlamaMLP.forward) and weight is not None and multiplies_by_liger(module, weight)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `(..., I)` that [`takes`] takes."""
    return _kernels().swiglu_forward(gate, up)[-1]


def swiglu_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *, overwrites: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, given that of [`swiglu`]; `overwrites` allows to write them over both."""
    pair = (gate, up) if overwrites else (gate.clone(), up.clone())
    return _kernels().swiglu_backward(*pair, grad.contiguous())


def _kernels() -> LigerKernels:
    kernels = liger_kernels()
    assert kernels is not None
    return kernels


def is_last_backward() -> bool:
    """Whether the backward that runs now frees what was kept for it, so that it may be written over."""
    # AOTAutograd asks the same before it donates buffers. With `retain_graph=True` they are read again.
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    asks = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return asks is not None and not asks()


class _SwiGLU(Function):
    """`silu(gate) * up` of `(..., I)`; keeps gate and up."""

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
    """Llama's MLP of `(..., D)`, its product by Liger where the kernels take it."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    product = _SwiGLU.apply(gate, up) if takes(gate, up) else mlp.act_fn(gate) * up
    return mlp.down_proj(product)


class SwiGLUOverride(Override):
    """A gated MLP without adapters, whose product is Liger's in packed calls."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's forward, of `(..., D)`."""
        if torch.compiler.is_compiling() or current_layout() is None or not multiplies_by_liger(self.module, x):
            return self.call_original(x)
        return gated_by_liger(self.module, x)
