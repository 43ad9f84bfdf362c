"""The products of adapted layers, forward and backward. Nothing is saved but inputs; the backward computes the rest
again.

Shape letters: T tokens, D input features, O output features, I features inside an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...runtime.autocast import outside_autocast
from ..liger.library import DTYPES, takes
from ..liger.swiglu import is_last_backward, swiglu, swiglu_gradients
from .layers import Layers, chunk_size, chunks
from .projections import Projection

# Arguments of [`GatedMLP`] between its input and its adapters.
_OPTIONS = 6
Activation = Callable[[torch.Tensor], torch.Tensor]


class _Gated:
    """`activation(gate) * up` of some tokens `(T, I)`, and its gradients."""

    def __init__(self, activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.gate, self.up = gate.detach().requires_grad_(), up
        with torch.enable_grad():
            self.active = activation(self.gate)
        self.product = self.active.detach() * up

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of gate and up, given that of the product, which is written over."""
        (grad_gate,) = torch.autograd.grad(self.active, self.gate, self.up * grad)
        return grad_gate, grad.mul_(self.active.detach())


class _GatedByLiger:
    """The same for SiLU, in one pass over memory each; `overwrites` allows to write over gate and up."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, *, overwrites: bool) -> None:
        self.gate, self.up, self.overwrites = gate, up, overwrites
        self.product = swiglu(gate, up)

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of gate and up, given that of the product."""
        return swiglu_gradients(self.gate, self.up, grad, overwrites=self.overwrites)


def project_forward(
    x_TD: torch.Tensor, projections: Sequence[Projection], dtype: torch.dtype, dtypes_out: Sequence[torch.dtype]
) -> tuple[torch.Tensor, ...]:
    """The outputs `(T, O)` of layers with one input `(T, D)`, in their dtypes."""
    layers = Layers(projections, dtype)
    outs = [x_TD.new_empty(len(x_TD), p.features, dtype=out) for p, out in zip(projections, dtypes_out, strict=True)]
    for x, *parts in chunks(x_TD, *outs, size=_size(x_TD, projections, dtype)):
        layers.apply(x, parts)
    return tuple(outs)


def project_backward(
    x_TD: torch.Tensor,
    projections: Sequence[Projection],
    grads: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    input_trains: bool,
) -> list[torch.Tensor | None]:
    """The gradients of the input, `None` unless it trains, and of `lora_A` and `lora_B` of each layer in turn."""
    layers = Layers(projections, dtype)
    layers.start_backward()
    grad_x = torch.empty_like(x_TD) if input_trains else None
    room = x_TD if grad_x is None else grad_x
    for x, part, *chunk in chunks(x_TD, room, *grads, size=_size(x_TD, projections, dtype)):
        layers.backward(x, chunk, None if grad_x is None else part)
    return [grad_x, *layers.adapter_gradients()]


def _size(x_TD: torch.Tensor, projections: Sequence[Projection], dtype: torch.dtype) -> int:
    return chunk_size(max(p.features for p in projections), x_TD.device, dtype)


class ProjectTogether(Function):
    """Several layers of one input `(T, D)` to their outputs `(T, O)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        projections: Sequence[Projection],
        dtype: torch.dtype,
        dtypes_out: Sequence[torch.dtype],
        *adapters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """`adapters` are `lora_A`, `lora_B` of each projection: named so that autograd sees them."""
        ctx.projections, ctx.dtype = projections, dtype
        ctx.save_for_backward(x_TD, *adapters)
        return project_forward(x_TD, projections, dtype, dtypes_out)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Of the input and of every adapter."""
        x_TD, *_ = ctx.saved_tensors
        trains = ctx.needs_input_grad[0]
        grad_x, *factors = project_backward(x_TD, ctx.projections, grads, ctx.dtype, input_trains=trains)
        return grad_x, None, None, None, *factors


class GatedMLP(Function):
    """`down(activation(gate(x)) * up(x))`: keeps gate and up, computes everything else again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        projections: Sequence[Projection],
        activation: Activation,
        by_liger: bool,
        dtype: torch.dtype,
        dtype_out: torch.dtype,
        keeps: bool,
        *adapters: torch.Tensor | None,
    ) -> torch.Tensor:
        """`projections` are gate, up, down; `by_liger` leaves the activation, SiLU, and the product to Liger; `keeps`
        says whether a backward may come."""
        inner, outer = Layers(projections[:2], dtype), Layers(projections[2:], dtype)
        tokens, features = len(x_TD), projections[0].features
        ctx.size = size = chunk_size(features, x_TD.device, dtype)
        out_TD = x_TD.new_empty(tokens, projections[2].features, dtype=dtype_out)
        kept = [x_TD.new_empty(tokens if keeps else min(tokens, size), features, dtype=dtype_out) for _ in range(2)]
        by_liger = by_liger and takes(*kept) and dtype in DTYPES
        for number, (x, out) in enumerate(chunks(x_TD, out_TD, size=size)):
            start = number * size if keeps else 0
            gate, up = inner.apply(x, [part[start : start + len(x)] for part in kept])
            outer.apply(swiglu(gate, up) if by_liger else activation(gate) * up, [out])
        ctx.projections, ctx.activation, ctx.dtype, ctx.by_liger = projections, activation, dtype, by_liger
        ctx.save_for_backward(x_TD, *kept, *adapters)
        return out_TD

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[Any, ...]:
        """Of the input and of every adapter."""
        x_TD, gate_TI, up_TI, *_ = ctx.saved_tensors
        inner, outer = Layers(ctx.projections[:2], ctx.dtype), Layers(ctx.projections[2:], ctx.dtype)
        inner.start_backward()
        outer.start_backward()
        grad_x = torch.empty_like(x_TD)
        overwrites = gate_TI.dtype != ctx.dtype or is_last_backward()  # a cast is a copy
        for x, gate, up, grad, out in chunks(x_TD, gate_TI, up_TI, grad_TD, grad_x, size=ctx.size):
            gate, up = gate.to(ctx.dtype), up.to(ctx.dtype)
            gated: Any = (
                _GatedByLiger(gate, up, overwrites=overwrites) if ctx.by_liger else _Gated(ctx.activation, gate, up)
            )
            grad_h = torch.empty_like(up)
            outer.backward(gated.product, [grad], grad_h)
            inner.backward(x, gated.gradients(grad_h), out if ctx.needs_input_grad[0] else None)
        grad_adapters = [*inner.adapter_gradients(), *outer.adapter_gradients()]
        return grad_x if ctx.needs_input_grad[0] else None, *(None,) * _OPTIONS, *grad_adapters
