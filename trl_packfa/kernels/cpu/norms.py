"""RMSNorm on a CPU, for Llama's norm and its copies in other architectures.

Shape letter: D normalized features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...layout.call_context import current_layout
from ...runtime.override import Override, computes_as
from .pieces import are_worth_it, pieces


def is_rms_norm_on_cpu(module: nn.Module) -> bool:
    """Tell whether a module computes Llama's RMSNorm and its weight is on a CPU."""
    return computes_as(module, LlamaRMSNorm.forward) and all(p.device.type == "cpu" for p in module.parameters())


class RMSNormOverride(Override):
    """An RMSNorm that packed calls compute in pieces of tokens."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the norm's forward on `(..., D)`."""
        norm: Any = self.module
        if not are_worth_it(hidden_states) or current_layout() is None:
            return self.call_original(hidden_states)
        return _RMSNorm.apply(hidden_states, norm.weight, norm.variance_epsilon)  # type: ignore[return-value]


class _RMSNorm(Function):
    """Autograd function of `x / sqrt(mean(x ** 2) + eps) * weight` for `(..., D)`.

    It computes in float32 up to the product with the weight, and saves its input only.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = hidden.new_empty(hidden.shape, dtype=torch.promote_types(hidden.dtype, weight.dtype))
        rates = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        for x, rate, out in pieces(hidden, rates, normed, like=hidden, trailing=1):
            wide = x.float()
            torch.mean(wide.square(), -1, keepdim=True, out=rate).add_(eps).rsqrt_()
            torch.mul(weight, (wide * rate).to(x.dtype), out=out)
        ctx.save_for_backward(hidden, weight, rates)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, rates = ctx.saved_tensors
        cubes, wide_weight = rates.pow(3).div_(-hidden.shape[-1]), weight.float()
        grad_hidden = hidden.new_empty(hidden.shape)
        grad_weight = torch.zeros_like(wide_weight) if ctx.needs_input_grad[1] else None
        for x, rate, cube, grad, out in pieces(hidden, rates, cubes, grads, grad_hidden, like=hidden, trailing=1):
            x, grad = x.float(), grad.float()
            if grad_weight is not None:
                grad_weight += (grad * x).mul_(rate).flatten(0, -2).sum(0)
            by = grad * wide_weight
            along = torch.linalg.vecdot(by, x).unsqueeze(-1).mul_(cube)
            into = out if out.dtype == torch.float32 else None
            result = torch.addcmul(by.mul_(rate), x, along, out=into)
            if into is None:
                out.copy_(result)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None
