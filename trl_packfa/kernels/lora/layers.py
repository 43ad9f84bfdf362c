"""LoRA layers that share an input, prepared for one forward or backward.

In float32 the update is merged into the base weight for one product: `W + s B A` costs one pass over the weights, but
adding `s B A x` costs several passes over the activations. Half precision would round the merged update away, and
dropout changes the input of the update only. There the update is a separate product that is added to the base result.
Layers with dropout compute it so in evaluation mode too, so that a check without dropout runs what training runs.

Shape letters: T tokens, D input features, O output features, R rank (of all layers together if they are stacked).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch

from ...autocast import HALF
from .dropout import Masks
from .projections import Projection

# Tokens of a chunk. On CPUs larger products are faster, by up to 8 % of a step, until temporaries exceed 32 MB, which
# glibc allocates anew each time. In half precision each product also reorders the weight, which takes as long as about
# 500 tokens. A GPU needs large chunks to be busy, and it reuses the memory of temporaries.
_FEWEST, _MOST, _ON_GPU = 1024, 4096, 8192
_ELEMENTS = 8 * 1024**2


def _merge(projection: Projection, dtype: torch.dtype) -> torch.Tensor:
    """Return `W + s B A` `(O, D)`."""
    weight = projection.base(dtype)
    if projection.lora_A is None or projection.lora_B is None:
        return weight
    lora_A, lora_B = projection.lora_A.to(dtype), projection.lora_B.to(dtype)
    if projection.quant_state is None and weight.data_ptr() == projection.weight.data_ptr():
        return torch.addmm(weight, lora_B, lora_A, alpha=projection.scaling)
    return weight.addmm_(lora_B, lora_A, alpha=projection.scaling)


def chunks(*tensors: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same `size` tokens of each tensor `(T, ...)`, so that temporaries stay small."""
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def chunk_size(features: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of tokens of a chunk, for products in `dtype` whose temporaries have this many features."""
    if not _is_cpu(device):
        return _ON_GPU
    return _MOST if dtype in HALF else min(max(_ELEMENTS // features, _FEWEST), _MOST)


def _add_up(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute `total += a.T @ b` for a narrow `a`.

    Totals of half-precision products are float32. On a CPU a transposed copy of `a` is faster for these.
    """
    if total.dtype == a.dtype:
        total.addmm_(a.T, b)
    else:
        total += (a.T.contiguous() if _is_cpu(a.device) else a.T) @ b


class Layers:
    """Layers with one input in a forward or a backward, and the gradients of their adapters.

    `masks` are the dropout masks `(T, D)` of the whole input. Chunks begin at token `start` of it.
    """

    def __init__(self, projections: Sequence[Projection], dtype: torch.dtype, masks: Masks) -> None:
        self.projections, self.dtype = projections, dtype
        self.adapted = [number for number, p in enumerate(projections) if p.lora_A is not None]
        self.adds = bool(self.adapted) and (dtype in HALF or any(p.dropout for p in projections))
        self.weights = [p.base(dtype) if self.adds else _merge(p, dtype) for p in projections]
        self.biases = [None if p.bias is None else p.bias.to(dtype) for p in projections]
        self.Bs = [projections[number].lora_B.to(dtype) for number in self.adapted]  # type: ignore[union-attr]
        # One for each adapted layer, or none at all.
        self.masks = [masks[number] for number in self.adapted] if any(p.draws for p in projections) else []
        # Masks only select. Division by the share that they keep is part of the scaling.
        self.scalings = [p.scaling / (1 - p.dropout) if p.draws else p.scaling for p in projections]

    @cached_property
    def As_RD(self) -> torch.Tensor:
        """`lora_A` of all adapted layers, `(R, D)`. Merged layers need it for gradients only."""
        return torch.cat([self.projections[number].lora_A.to(self.dtype) for number in self.adapted])  # type: ignore[union-attr]

    def _by_layer(self, inner_TR: torch.Tensor, dim: int = 1) -> Sequence[torch.Tensor]:
        """Split `(T, R)` into the ranks of each adapted layer."""
        return inner_TR.split([B.shape[1] for B in self.Bs], dim=dim)

    def _masks_of(self, x_TD: torch.Tensor, start: int) -> Masks:
        """Return the part of each mask that belongs to a chunk."""
        return [None if mask is None else mask[start : start + len(x_TD)] for mask in self.masks]

    def _inner(self, x_TD: torch.Tensor, start: int) -> Iterable[torch.Tensor]:
        """Return the product `(T, R)` of each adapter's input with its `lora_A`."""
        if not self.masks:
            return self._by_layer(x_TD @ self.As_RD.T)
        masks = zip(self._masks_of(x_TD, start), self._by_layer(self.As_RD, dim=0), strict=True)
        return ((x_TD if mask is None else x_TD * mask) @ A_RD.T for mask, A_RD in masks)

    def apply(self, x_TD: torch.Tensor, outs: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
        """Write the outputs `(T, O)` of a chunk to `outs`. Return them in the widest dtype of their computation."""
        x_TD = x_TD.to(self.dtype)
        results = []
        for weight, bias, out in zip(self.weights, self.biases, outs, strict=True):
            into = out if out.dtype == self.dtype else None
            product = (
                torch.mm(x_TD, weight.T, out=into) if bias is None else torch.addmm(bias, x_TD, weight.T, out=into)
            )
            results.append(product)
        # bitsandbytes converts its half-precision product to the input's float32, and PEFT adds the update to that. In
        # half precision the small update of a new adapter would be rounded away.
        for number, out in enumerate(outs):
            if out.dtype.itemsize > self.dtype.itemsize:
                results[number] = out.copy_(results[number])
        if self.adds:
            for number, B, inner in zip(self.adapted, self.Bs, self._inner(x_TD, start), strict=True):
                result, scaling = results[number], self.scalings[number]
                if result.dtype == self.dtype:
                    result.addmm_(inner, B.T, alpha=scaling)
                else:
                    result.add_(inner @ B.T, alpha=scaling)
        for result, out in zip(results, outs, strict=True):
            if result is not out:
                out.copy_(result)
        return results

    def start_backward(self) -> None:
        """Allocate the adapters' gradients."""
        if not self.adapted:
            return
        total = torch.float32 if self.dtype in HALF else self.dtype
        self.grad_As = torch.zeros_like(self.As_RD, dtype=total)
        # Transposed, because products with the wide dimension last are faster.
        self.grad_Bs_RO = [torch.zeros_like(B.T, dtype=total, memory_format=torch.contiguous_format) for B in self.Bs]

    def backward(
        self, x_TD: torch.Tensor, grads: Sequence[torch.Tensor], out: torch.Tensor | None, start: int
    ) -> None:
        """Add a chunk to the gradients of the adapters. Write the gradient of the input to `out` if it is given."""
        x_TD, grads = x_TD.to(self.dtype), [grad.to(self.dtype) for grad in grads]
        grad_x = None
        if out is not None:
            grad_x = torch.mm(grads[0], self.weights[0], out=out if out.dtype == self.dtype else None)
            for grad, weight in zip(grads[1:], self.weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
        if self.masks:
            self._dropped_backward(x_TD, grads, grad_x, start)
        elif self.adapted:
            self._adapters_backward(x_TD, grads, grad_x)
        if out is not None and grad_x is not None and grad_x is not out:
            out.copy_(grad_x)

    def _adapters_backward(
        self, x_TD: torch.Tensor, grads: Sequence[torch.Tensor], grad_x: torch.Tensor | None
    ) -> None:
        outer = []
        inners = self._by_layer(x_TD @ self.As_RD.T)
        for number, B, inner, grad_B_RO in zip(self.adapted, self.Bs, inners, self.grad_Bs_RO, strict=True):
            outer.append((grads[number] @ B).mul_(self.scalings[number]))
            _add_up(grad_B_RO, inner, grads[number])
        outer_TR = torch.cat(outer, dim=1)
        _add_up(self.grad_As, outer_TR, x_TD)
        if self.adds and grad_x is not None:
            grad_x.addmm_(outer_TR, self.As_RD)

    def _dropped_backward(
        self, x_TD: torch.Tensor, grads: Sequence[torch.Tensor], grad_x: torch.Tensor | None, start: int
    ) -> None:
        """Do the same with an input of its own for each adapter."""
        As, grad_As = self._by_layer(self.As_RD, dim=0), self._by_layer(self.grad_As, dim=0)
        layers = zip(self.adapted, self._masks_of(x_TD, start), As, self.Bs, grad_As, self.grad_Bs_RO, strict=True)
        for number, mask, A_RD, B, grad_A, grad_B_RO in layers:
            kept_TD = x_TD if mask is None else x_TD * mask
            outer_TR = (grads[number] @ B).mul_(self.scalings[number])
            _add_up(grad_B_RO, kept_TD @ A_RD.T, grads[number])
            _add_up(grad_A, outer_TR, kept_TD)
            if grad_x is None:
                continue
            if mask is None:
                grad_x.addmm_(outer_TR, A_RD)
            else:
                grad_x.addcmul_(outer_TR @ A_RD, mask)

    def adapter_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of `lora_A` and `lora_B` of each layer in turn."""
        found: list[torch.Tensor | None] = [None, None] * len(self.projections)
        if not self.adapted:
            return found
        parts = self.grad_As.split([B.shape[1] for B in self.Bs])
        for number, grad_A, grad_B_RO in zip(self.adapted, parts, self.grad_Bs_RO, strict=True):
            projection = self.projections[number]
            assert projection.lora_A is not None and projection.lora_B is not None
            found[2 * number] = grad_A.to(projection.lora_A.dtype)
            found[2 * number + 1] = (grad_B_RO.T * self.scalings[number]).to(projection.lora_B.dtype)
        return found
