"""The products of adapted layers, forward and backward.

The update is merged into the base weight for the length of one product: `W + s B A` costs a pass over the weights,
where adding `s B A x` costs several over the activations. Nothing is saved but inputs, and the backward merges again.

Tokens are taken in chunks, so that temporaries stay small and in cache.

Shape letters: T tokens, D input features, O output features, I features inside an MLP, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .projections import Projection

_CHUNK = 1024

Activation = Callable[[torch.Tensor], torch.Tensor]


def _merge(projection: Projection, dtype: torch.dtype) -> torch.Tensor:
    """`W + s B A` `(O, D)`."""
    weight = projection.base(dtype)
    if projection.lora_A is None or projection.lora_B is None:
        return weight
    lora_A, lora_B = projection.lora_A.to(dtype), projection.lora_B.to(dtype)
    if projection.quant_state is None and weight.data_ptr() == projection.weight.data_ptr():
        return torch.addmm(weight, lora_B, lora_A, alpha=projection.scaling)
    return weight.addmm_(lora_B, lora_A, alpha=projection.scaling)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(_CHUNK) for tensor in tensors), strict=True)


def _multiply(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    """`x @ matrix + bias` written to `out`, rounded to its dtype; returns it unrounded."""
    into = out if out.dtype == x.dtype else None
    result = torch.mm(x, matrix, out=into) if bias is None else torch.addmm(bias, x, matrix, out=into)
    if into is None:
        out.copy_(result)
    return result


class _Merged:
    """Layers with one input, merged for a forward or a backward, and the gradients of their adapters."""

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype) -> None:
        self.projections, self.dtype = projections, dtype
        self.weights = [_merge(projection, dtype) for projection in projections]
        self.biases = [None if p.bias is None else p.bias.to(dtype) for p in projections]

    def apply(self, x_TD: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write the outputs `(T, O)` of a chunk; returns them in the merged weights' dtype."""
        x_TD = x_TD.to(self.dtype)
        layers = zip(self.weights, self.biases, outs, strict=True)
        return [_multiply(x_TD, weight.T, bias, out=out) for weight, bias, out in layers]

    def start_backward(self) -> None:
        """Make room for the adapters' gradients."""
        adapted = [p for p in self.projections if p.lora_A is not None]
        self.As_RD = torch.cat([p.lora_A.to(self.dtype) for p in adapted]) if adapted else None  # type: ignore[union-attr]
        self.Bs = [None if p.lora_B is None else p.lora_B.to(self.dtype) for p in self.projections]
        self.grad_As = None if self.As_RD is None else torch.zeros_like(self.As_RD)
        self.grad_Bs = [None if B is None else torch.zeros_like(B) for B in self.Bs]

    def backward(self, x_TD: torch.Tensor, grads: Sequence[torch.Tensor], out: torch.Tensor | None) -> None:
        """Add up the gradients of the adapters over a chunk, and write the input's to `out`, if there is one."""
        x_TD, grads = x_TD.to(self.dtype), [grad.to(self.dtype) for grad in grads]
        if self.As_RD is not None and self.grad_As is not None:
            inner_TR = x_TD @ self.As_RD.T
            outer, start = [], 0
            for grad, B, grad_B in zip(grads, self.Bs, self.grad_Bs, strict=True):
                if B is None or grad_B is None:
                    continue
                outer.append(grad @ B)
                grad_B.addmm_(grad.T, inner_TR[:, start : start + B.shape[1]])
                start += B.shape[1]
            self.grad_As.addmm_(torch.cat(outer, dim=1).T, x_TD)
        if out is None:
            return
        grad_x = _multiply(grads[0], self.weights[0], out=out)
        for grad, weight in zip(grads[1:], self.weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        if grad_x is not out:
            out.copy_(grad_x)

    def adapter_gradients(self) -> list[torch.Tensor | None]:
        """Of `lora_A` and `lora_B` of each layer in turn."""
        found: list[torch.Tensor | None] = []
        start = 0
        for projection, grad_B in zip(self.projections, self.grad_Bs, strict=True):
            if grad_B is None or self.grad_As is None:
                found += [None, None]
                continue
            grad_A = self.grad_As[start : start + grad_B.shape[1]]
            start += grad_B.shape[1]
            assert projection.lora_A is not None and projection.lora_B is not None
            found += [(grad_A * projection.scaling).to(projection.lora_A.dtype)]
            found += [(grad_B * projection.scaling).to(projection.lora_B.dtype)]
        return found


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
        merged = _Merged(projections, dtype)
        outs = [
            x_TD.new_empty(len(x_TD), p.features, dtype=out) for p, out in zip(projections, dtypes_out, strict=True)
        ]
        for x, *parts in _chunks(x_TD, *outs):
            merged.apply(x, parts)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Of the input and of every adapter."""
        x_TD, *_ = ctx.saved_tensors
        merged = _Merged(ctx.projections, ctx.dtype)
        merged.start_backward()
        grad_x = torch.empty_like(x_TD) if ctx.needs_input_grad[0] else None
        room = x_TD if grad_x is None else grad_x
        for x, part, *chunk in _chunks(x_TD, room, *grads):
            merged.backward(x, chunk, None if grad_x is None else part)
        return grad_x, None, None, None, *merged.adapter_gradients()


class GatedMLP(Function):
    """`down(activation(gate(x)) * up(x))`: keeps gate and up, computes everything else again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        projections: Sequence[Projection],
        activation: Activation,
        dtype: torch.dtype,
        dtype_out: torch.dtype,
        keeps: bool,
        *adapters: torch.Tensor | None,
    ) -> torch.Tensor:
        """`projections` are gate, up, down; `keeps` says whether a backward may come."""
        inner, outer = _Merged(projections[:2], dtype), _Merged(projections[2:], dtype)
        tokens, features = len(x_TD), projections[0].features
        out_TD = x_TD.new_empty(tokens, projections[2].features, dtype=dtype_out)
        kept = [x_TD.new_empty(tokens if keeps else min(tokens, _CHUNK), features, dtype=dtype_out) for _ in range(2)]
        for number, (x, out) in enumerate(_chunks(x_TD, out_TD)):
            start = number * _CHUNK if keeps else 0
            gate, up = inner.apply(x, [part[start : start + len(x)] for part in kept])
            outer.apply(activation(gate) * up, [out])
        ctx.projections, ctx.activation, ctx.dtype = projections, activation, dtype
        ctx.save_for_backward(x_TD, *kept, *adapters)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[Any, ...]:
        """Of the input and of every adapter."""
        x_TD, gate_TI, up_TI, *_ = ctx.saved_tensors
        inner, outer = _Merged(ctx.projections[:2], ctx.dtype), _Merged(ctx.projections[2:], ctx.dtype)
        inner.start_backward()
        outer.start_backward()
        grad_x = torch.empty_like(x_TD)
        for x, gate, up, grad, out in _chunks(x_TD, gate_TI, up_TI, grad_TD, grad_x):
            gate, up = gate.detach().to(ctx.dtype).requires_grad_(), up.to(ctx.dtype)
            with torch.enable_grad():
                active = ctx.activation(gate)
            grad_h = torch.empty_like(up)
            outer.backward(active.detach() * up, [grad], grad_h)
            (grad_gate,) = torch.autograd.grad(active, gate, up * grad_h)
            grad_up = grad_h.mul_(active.detach())
            inner.backward(x, [grad_gate, grad_up], out if ctx.needs_input_grad[0] else None)
        grad_adapters = [*inner.adapter_gradients(), *outer.adapter_gradients()]
        return grad_x if ctx.needs_input_grad[0] else None, None, None, None, None, None, *grad_adapters
