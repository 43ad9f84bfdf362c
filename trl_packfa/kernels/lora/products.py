"""The products of LoRA layers, forward and backward.

Only inputs, their narrow products with `lora_A`, and in a gated MLP gate and up are saved. Of an input that a norm has
made, the norm's input is saved, which the norm keeps anyway. The backward computes the rest again.

Shape letters: T tokens, D input features, O output features, I features inside an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...autocast import outside_autocast
from ..liger import DTYPES, is_last_backward, swiglu, takes
from ..norms import Scales, Source, save_input, saved_input
from . import launches
from .dropout import Dropout, Masks
from .layers import Layers, chunk_size, chunks
from .projections import Projection, factors_of

# Arguments of [`_GatedMLP`] between its input and its adapters.
_OPTIONS = 8
Activation = Callable[[torch.Tensor], torch.Tensor]


def project_forward(
    x_TD: torch.Tensor,
    projections: Sequence[Projection],
    dtype: torch.dtype,
    dtypes_out: Sequence[torch.dtype],
    masks: Masks = (),
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Compute the outputs `(T, O)` of layers with one input `(T, D)`, each in its dtype of `dtypes_out`.

    Return them and the `inners` of [`Layers`].
    """
    layers, size = Layers(projections, dtype, masks), _size(x_TD, projections, dtype)
    outs = [x_TD.new_empty(len(x_TD), p.features, dtype=out) for p, out in zip(projections, dtypes_out, strict=True)]
    for number, (x, *parts) in enumerate(chunks(x_TD, *outs, size=size)):
        layers.apply(x, parts, number * size)
    return tuple(outs), layers.inners


def project_backward(
    x_TD: torch.Tensor,
    projections: Sequence[Projection],
    grads: Sequence[torch.Tensor],
    dtype: torch.dtype,
    masks: Masks = (),
    inners: Sequence[torch.Tensor] = (),
    *,
    input_trains: bool,
    scales: Scales | None = None,
) -> list[torch.Tensor | None]:
    """Compute the gradients of the input (`None` if not `input_trains`) and of `lora_A`, `lora_B` of each layer.

    `scales` are factors that `x_TD` lacks.
    """
    layers, size = Layers(projections, dtype, masks, inners, scales), _size(x_TD, projections, dtype)
    grad_x = torch.empty_like(x_TD) if input_trains else None
    room = x_TD if grad_x is None else grad_x
    for number, (x, part, *chunk) in enumerate(chunks(x_TD, room, *grads, size=size)):
        layers.backward(x, chunk, None if grad_x is None else part, number * size)
    return [grad_x, *layers.adapter_gradients()]


def _size(x_TD: torch.Tensor, projections: Sequence[Projection], dtype: torch.dtype) -> int:
    return chunk_size(max(p.features for p in projections), x_TD.device, dtype)


class ProjectTogether(Function):
    """Autograd function from one input `(T, D)` to the outputs `(T, O)` of several layers."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        source: Source | None,
        projections: Sequence[Projection],
        dtype: torch.dtype,
        dtypes_out: Sequence[torch.dtype],
        *adapters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs. `adapters` are `lora_A`, `lora_B` of each projection, so that autograd sees them."""
        ctx.projections, ctx.dtype, ctx.dropout = projections, dtype, Dropout(projections, x_TD.device, dtype)
        masks = ctx.dropout.draw(*x_TD.shape)
        outs, inners = project_forward(x_TD, projections, dtype, dtypes_out, masks)
        save_input(ctx, x_TD, source, *adapters, *inners)
        return outs

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients of the input and of every adapter."""
        x_TD, scales, saved = saved_input(ctx, ctx.dtype)
        trains, masks = ctx.needs_input_grad[0], ctx.dropout.draw_again(*x_TD.shape)
        options = {"inners": saved[2 * len(ctx.projections) :], "input_trains": trains, "scales": scales}
        found = project_backward(x_TD, ctx.projections, grads, ctx.dtype, masks, **options)
        return found[0], None, None, None, None, *found[1:]


class _Keep(Function):
    """Autograd function that saves tensors for the next function and returns the first one.

    torch collects the saved tensors of an autograd function after its forward. Activation checkpointing ends its
    second forward at the last saved tensor. So a function that saves its own tensors would compute its last product
    there for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, source: Source | None, keepers: list[Any], *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        """Save the tensors and append the context, which has `saved_tensors`, to `keepers`."""
        ctx.set_materialize_grads(False)
        keepers.append(ctx)
        save_input(ctx, x_TD, source, *tensors)
        ctx.others = len(tensors)
        return x_TD.view_as(x_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        return grad, *(None,) * (ctx.others + 2)


@dataclass(frozen=True)
class _Kept:
    """Gate and up `(T, I)`, the context that saves them and the input, and whether the input needs a gradient."""

    gate: torch.Tensor
    up: torch.Tensor
    dropout: Dropout  # of gate and up
    keeper: Any
    input_trains: bool


def gated_mlp(
    x_TD: torch.Tensor,
    projections: Sequence[Projection],
    activation: Activation,
    source: Source | None,
    *,
    by_liger: bool,
    dtype: torch.dtype,
    dtype_out: torch.dtype,
) -> torch.Tensor:
    """Compute `down(activation(gate(x)) * up(x))`. Save gate and up; the backward computes everything else again.

    `projections` are gate, up and down; `source` is what the input was made of. `by_liger` lets Liger compute the
    activation (SiLU) and the product with it. Products are in `dtype`, and their results in `dtype_out`.
    """
    keeps, kept = torch.is_grad_enabled(), None
    adapters = factors_of(projections)
    # A narrower `dtype_out` would round gate and up when they are saved, but the forward multiplies them unrounded.
    if keeps and (dtype_out == dtype or dtype_out.itemsize > dtype.itemsize):
        keepers: list[Any] = []
        dropout = Dropout(projections[:2], x_TD.device, dtype)
        with torch.no_grad():
            masks = dropout.draw(*x_TD.shape)
            gate_up, inners = project_forward(x_TD, projections[:2], dtype, (dtype_out,) * 2, masks)
        input_trains = x_TD.requires_grad
        x_TD = _Keep.apply(x_TD, source, keepers, *gate_up, *adapters, *inners)  # type: ignore[assignment]
        kept = _Kept(gate_up[0], gate_up[1], dropout, keepers[0], input_trains)
    options = (source, projections, activation, by_liger, dtype, dtype_out, keeps)
    return _GatedMLP.apply(x_TD, kept, *options, *adapters)  # type: ignore[return-value]


class _GatedMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        kept: _Kept | None,
        source: Source | None,
        projections: Sequence[Projection],
        activation: Activation,
        by_liger: bool,
        dtype: torch.dtype,
        dtype_out: torch.dtype,
        keeps: bool,
        *adapters: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the output. `kept` has gate and up if they are known; `keeps` says that a backward may follow."""
        tokens, features = len(x_TD), projections[0].features
        inner, ctx.inner_dropout = None, None if kept is None else kept.dropout
        if kept is None:
            ctx.inner_dropout = Dropout(projections[:2], x_TD.device, dtype)
            inner = Layers(projections[:2], dtype, ctx.inner_dropout.draw(*x_TD.shape))
        ctx.outer_dropout = Dropout(projections[2:], x_TD.device, dtype)
        outer = Layers(projections[2:], dtype, ctx.outer_dropout.draw(tokens, features))
        ctx.size = size = chunk_size(features, x_TD.device, dtype)
        out_TD = x_TD.new_empty(tokens, projections[2].features, dtype=dtype_out)
        if kept is None:
            room = tokens if keeps else min(tokens, size)
            gate_TI, up_TI = (x_TD.new_empty(room, features, dtype=dtype_out) for _ in range(2))
        else:
            gate_TI, up_TI = kept.gate, kept.up
        by_liger = by_liger and takes(gate_TI, up_TI) and dtype in DTYPES
        for number, (x, out) in enumerate(chunks(x_TD, out_TD, size=size)):
            start = number * size
            first = start if keeps else 0
            gate, up = (part[first : first + len(x)] for part in (gate_TI, up_TI))
            if inner is not None:
                gate, up = inner.apply(x, [gate, up], start)
            outer.apply(swiglu(gate, up) if by_liger else activation(gate) * up, [out], start)
        ctx.projections, ctx.activation, ctx.dtype, ctx.by_liger = projections, activation, dtype, by_liger
        # Not saved by torch, because a checkpoint would then compute the last product again. They are narrow.
        ctx.outer_inners = outer.inners
        if kept is None:
            ctx.keeper, ctx.input_trains = None, ctx.needs_input_grad[0]
            save_input(ctx, x_TD, source, gate_TI, up_TI, *adapters, *(() if inner is None else inner.inners))
        else:
            ctx.keeper, ctx.input_trains = kept.keeper, kept.input_trains
        return out_TD

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients of the input and of every adapter."""
        kept = ctx if ctx.keeper is None else ctx.keeper
        x_TD, scales, (gate_TI, up_TI, *saved) = saved_input(kept, ctx.dtype)
        masks, inners = ctx.inner_dropout.draw_again(*x_TD.shape), saved[2 * len(ctx.projections) :]
        inner = Layers(ctx.projections[:2], ctx.dtype, masks, inners, scales)
        masks = ctx.outer_dropout.draw_again(*gate_TI.shape)
        outer = Layers(ctx.projections[2:], ctx.dtype, masks, inners=ctx.outer_inners)
        grad_x = torch.empty_like(x_TD)
        overwrites = gate_TI.dtype != ctx.dtype or is_last_backward()  # a cast is a copy
        parts = chunks(x_TD, gate_TI, up_TI, grad_TD, grad_x, size=ctx.size)
        for number, (x, gate, up, grad, out) in enumerate(parts):
            start = number * ctx.size
            gate, up = gate.to(ctx.dtype), up.to(ctx.dtype)
            grad_h = torch.empty_like(up)
            half = outer.to_input([grad], grad_h, start)
            if ctx.by_liger:
                *gradients, h = launches.swiglu_backward(gate, up, grad_h, overwrites=overwrites)
            else:
                *gradients, h = _gated_backward(ctx.activation, gate, up, grad_h)
            outer.to_adapters(h, half, start)
            del half, h
            inner.backward(x, gradients, out if ctx.input_trains else None, start)
        grad_adapters = [*inner.adapter_gradients(), *outer.adapter_gradients()]
        return grad_x if ctx.input_trains else None, *(None,) * _OPTIONS, *grad_adapters


def _gated_backward(
    activation: Activation, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up, and `activation(gate) * up`, from that product's gradient.

    All are `(T, I)`. The gradient of up takes the memory of `grad`.
    """
    gate = gate.detach().requires_grad_()
    with torch.enable_grad():
        active = activation(gate)
    (grad_gate,) = torch.autograd.grad(active, gate, up * grad)
    active = active.detach()
    return grad_gate, grad.mul_(active), active * up
