"""Fused LoRA inside compiled graphs: the projections of one input are one operator.

torch.compile cannot trace the chunks of tokens in `products.py`, or products that write into given memory. So a graph
calls them as one opaque operator. The compiler fuses norms, rotations and activations around it. 4-bit weights run
PEFT's own forward in graphs, because an operator accepts tensors only. So does dropout, whose random numbers are the
compiler's.

Shape letters: T tokens, D input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .products import project_backward, project_forward
from .projections import Projection

# Tensors of each layer: weight (O, D), bias (O,), lora_A (R, D), lora_B (O, R). A missing one is a tensor without
# elements, because autograd does not support lists of optional tensors.
_INPUTS = "Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] lora_As, Tensor[] lora_Bs"
_OPTIONS = "float[] scalings, ScalarType dtype, ScalarType dtype_out"
_NUM_OPTIONS = 3
torch.library.define("trl_packfa::project_together", f"({_INPUTS}, {_OPTIONS}) -> Tensor[]")
torch.library.define(
    "trl_packfa::project_together_backward", f"(Tensor[] grads, {_INPUTS}, {_OPTIONS}, bool input_trains) -> Tensor[]"
)

_Tensors = Sequence[torch.Tensor]


def project_in_graph(
    x_TD: torch.Tensor, projections: Sequence[Projection], dtype: torch.dtype, dtype_out: torch.dtype
) -> list[torch.Tensor]:
    """Compute the outputs `(T, O)` of layers with one input `(T, D)` while a graph is traced."""
    none = x_TD.new_empty(0)
    lists = [
        [none if part is None else part for part in parts]
        for parts in zip(*((p.weight, p.bias, p.lora_A, p.lora_B) for p in projections), strict=True)
    ]
    return torch.ops.trl_packfa.project_together(x_TD, *lists, [p.scaling for p in projections], dtype, dtype_out)


@torch.library.impl("trl_packfa::project_together", "default")
@torch.no_grad()
def _project(x_TD: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    *layers, dtype, dtype_out = inputs
    projections = _projections(*layers)
    with torch.autocast(x_TD.device.type, enabled=False):
        outs, _ = project_forward(x_TD, projections, dtype, [dtype_out] * len(projections))
    return list(outs)


@torch.library.impl("trl_packfa::project_together_backward", "default")
@torch.no_grad()
def _project_backward(grads: _Tensors, x_TD: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    """Return the gradients of `x`, of every `lora_A`, then of every `lora_B`. A missing one has no elements."""
    *layers, dtype, _, input_trains = inputs
    projections = _projections(*layers)
    with torch.autocast(x_TD.device.type, enabled=False):
        found = project_backward(x_TD, projections, grads, dtype, input_trains=input_trains)
    grad_x, *by_layer = (x_TD.new_empty(0) if grad is None else grad.contiguous() for grad in found)
    return [grad_x, *by_layer[::2], *by_layer[1::2]]


def _projections(
    weights: _Tensors, biases: _Tensors, lora_As: _Tensors, lora_Bs: _Tensors, scalings: Sequence[float]
) -> list[Projection]:
    layers = zip(weights, biases, lora_As, lora_Bs, scalings, strict=True)
    return [
        Projection(weight, _or_none(bias), None, _or_none(A), _or_none(B), scaling, weight.dtype)
        for weight, bias, A, B, scaling in layers
    ]


def _or_none(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None


@torch.library.register_fake("trl_packfa::project_together")
def _project_fake(x_TD: torch.Tensor, weights: _Tensors, *options: Any) -> list[torch.Tensor]:
    return [x_TD.new_empty((x_TD.shape[0], weight.shape[0]), dtype=options[-1]) for weight in weights]


@torch.library.register_fake("trl_packfa::project_together_backward")
def _project_backward_fake(grads: _Tensors, x_TD: torch.Tensor, *options: Any) -> list[torch.Tensor]:
    _, _, lora_As, lora_Bs, *_, input_trains = options
    like = (x_TD if input_trains else x_TD.new_empty(0), *lora_As, *lora_Bs)  # a missing factor has no elements
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_TD, *lists, ctx.scalings, ctx.dtype, ctx.dtype_out = inputs
    ctx.layers = len(lists[0])
    ctx.save_for_backward(x_TD, *(tensor for tensors in lists for tensor in tensors))


def _differentiate(ctx: Any, grads: _Tensors) -> tuple[Any, ...]:
    x_TD, *rest = ctx.saved_tensors
    lists = [rest[start : start + ctx.layers] for start in range(0, len(rest), ctx.layers)]
    options = (ctx.scalings, ctx.dtype, ctx.dtype_out, ctx.needs_input_grad[0])
    grad_x, *factors = torch.ops.trl_packfa.project_together_backward(grads, x_TD, *lists, *options)
    none = [None] * ctx.layers
    by_A, by_B = (
        [grad if grad.numel() else None for grad in half] for half in (factors[: ctx.layers], factors[ctx.layers :])
    )
    return grad_x if ctx.needs_input_grad[0] else None, none, none, by_A, by_B, *(None,) * _NUM_OPTIONS


torch.library.register_autograd("trl_packfa::project_together", _differentiate, setup_context=_save_inputs)
