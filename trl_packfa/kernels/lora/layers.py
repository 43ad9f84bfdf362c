"""LoRA layers that share an input, prepared for one forward or backward.

In float32 the update is merged into the base weight for one product: `W + s B A` costs one pass over the weights, but
adding `s B A x` costs several passes over the activations. Half precision would round the merged update away, and
dropout changes the input of the update only. There the update is a separate product that is added to the base result.
Layers with dropout compute it so in evaluation mode too, so that a check without dropout runs what training runs.

Shape letters: T tokens, D input features, O output features, R rank (of all layers together if they are stacked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from ...autocast import HALF
from .. import devices
from ..norms import Scales
from . import launches
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


def chunk_size(features: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of tokens of a chunk, for products in `dtype` whose temporaries have this many features."""
    if not devices.is_cpu(device):
        return _ON_GPU
    return _MOST if dtype in HALF else min(max(_ELEMENTS // features, _FEWEST), _MOST)


def _product(a: torch.Tensor, b: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Return `a.T @ b`. `wide` asks for it in float32 from half precision too, where the device makes it."""
    half = a.dtype in HALF
    if half and wide and devices.makes_float32(a.device):
        return torch.mm(a.T, b, out_dtype=torch.float32)
    # On a CPU a transposed copy of a narrow `a` is faster in half precision.
    return (a.T.contiguous() if half and devices.is_cpu(a.device) else a.T) @ b


def _add_to(totals: dict[int, torch.Tensor], layer: int, product: torch.Tensor) -> None:
    """Add a chunk's product to the total of a layer. Sums of half-precision products are float32."""
    if layer in totals:
        total = totals[layer]
        totals[layer] = (total.float() if total.dtype in HALF else total).add_(product)
    else:
        totals[layer] = product


def _linear(
    x_TD: torch.Tensor, weight_OD: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x_TD, weight_OD.T, out=out)
    return torch.addmm(bias, x_TD, weight_OD.T, out=out)


class _Adapter(NamedTuple):
    """The adapter of one layer, or of the first of several that are multiplied together."""

    layer: int
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    B: torch.Tensor  # in the dtype of the products
    ranks: slice  # among all ranks R
    mask: torch.Tensor | None  # of the whole input `(T, D)`
    scaling: float

    def mask_at(self, start: int, tokens: int) -> torch.Tensor | None:
        """Return the mask of a chunk."""
        return None if self.mask is None else self.mask[start : start + tokens]

    def input(self, x_TD: torch.Tensor, start: int) -> torch.Tensor:
        """Return what the adapter sees of a chunk."""
        mask = self.mask_at(start, len(x_TD))
        return x_TD if mask is None else x_TD * mask


class Half(NamedTuple):
    """Results of one half of a chunk's backward that the other half needs. Without adapters: the gradients only."""

    grads: list[torch.Tensor]  # of the outputs, in the dtype of the products
    outer_TR: torch.Tensor | None = None  # their scaled products with `lora_B`
    inner_TR: torch.Tensor | None = None  # the forward's, if the gradients of `lora_B` are done


class Layers:
    """Layers with one input in a forward or a backward, and the gradients of their adapters.

    `masks` are the dropout masks of the whole input `(T, D)`, or their bits. Chunks begin at token `start` of it. A
    forward that adds the update leaves each chunk's scaled product `(T, R)` with `lora_A` in `inners`. A backward
    takes it from there, or computes it again. With `scales` and `inners`, the input of a backward may lack factors.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        dtype: torch.dtype,
        masks: Masks,
        inners: Sequence[torch.Tensor] = (),
        scales: Scales | None = None,
    ) -> None:
        self.dtype, self.inners, self._scales = dtype, list(inners), scales
        self._bits = masks if isinstance(masks, torch.Tensor) else None
        self.adapters: list[_Adapter] = []
        first = 0
        for number, p in enumerate(projections):
            if p.lora_A is None or p.lora_B is None:
                continue
            ranks = slice(first, first + len(p.lora_A))
            mask = masks[number] if p.draws and self._bits is None else None
            # Masks only select. Division by the share that they keep is part of the scaling.
            scaling = p.scaling / (1 - p.dropout) if p.draws else p.scaling
            self.adapters.append(_Adapter(number, p.lora_A, p.lora_B, p.lora_B.to(dtype), ranks, mask, scaling))
            first = ranks.stop
        self.adds = bool(self.adapters) and (dtype in HALF or any(p.dropout for p in projections))
        self.weights = [p.base(dtype) if self.adds else _merge(p, dtype) for p in projections]
        self.biases = [None if p.bias is None else p.bias.to(dtype) for p in projections]
        alike = len({(id(adapter.mask), adapter.scaling) for adapter in self.adapters}) == 1
        self._groups = [self.adapters[0]._replace(ranks=slice(0, first))] if alike else self.adapters
        self._wide = any(torch.float32 in (adapter.lora_A.dtype, adapter.lora_B.dtype) for adapter in self.adapters)
        self._grad_As: dict[int, torch.Tensor] = {}
        self._grad_Bs: dict[int, torch.Tensor] = {}  # `(R, O)` on a CPU, else `(O, R)`

    @cached_property
    def As_RD(self) -> torch.Tensor:
        """`lora_A` of all adapted layers, `(R, D)`. Merged layers need it for gradients only."""
        As = [adapter.lora_A for adapter in self.adapters]
        return (As[0] if len(As) == 1 else torch.cat(As)).to(self.dtype)

    def _inner(self, x_TD: torch.Tensor, start: int) -> torch.Tensor:
        """Return the scaled product `(T, R)` of the adapters' inputs with `lora_A`."""
        if self._bits is not None:
            return launches.dropped_inner(
                x_TD, self.As_RD, self._bits[:, start : start + len(x_TD)], self.adapters[0].scaling
            )
        inner_TR = x_TD.new_empty(len(x_TD), len(self.As_RD))
        for group in self._groups:
            kept_TD = group.input(x_TD, start)
            inner_TR[:, group.ranks].addmm_(kept_TD, self.As_RD[group.ranks].T, beta=0, alpha=group.scaling)
        return inner_TR

    def apply(self, x_TD: torch.Tensor, outs: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
        """Write the outputs `(T, O)` of a chunk to `outs`. Return them in the widest dtype of their computation."""
        x_TD = x_TD.to(self.dtype)
        updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if self.adds:
            inner_TR = self._inner(x_TD, start)
            self.inners.append(inner_TR)
            updates = {adapter.layer: (inner_TR[:, adapter.ranks], adapter.B) for adapter in self.adapters}
        results = []
        for number, (weight, bias, out) in enumerate(zip(self.weights, self.biases, outs, strict=True)):
            update, into = updates.get(number), out if out.dtype == self.dtype else None
            if out.dtype.itemsize > self.dtype.itemsize:
                # bitsandbytes converts its half-precision product to the input's float32, and PEFT adds the update to
                # that. In half precision the small update of a new adapter would be rounded away.
                result = out.copy_(_linear(x_TD, weight, bias, None))
                if update is not None:
                    result.add_(_linear(*update, None, None))
            elif update is None:
                result = _linear(x_TD, weight, bias, into)
            else:
                # The base product is added to the update, not the update to it: a large product hides the reading.
                result = _linear(*update, bias, into).addmm_(x_TD, weight.T)
            if result is not out:
                out.copy_(result)
            results.append(result)
        return results

    def backward(
        self, x_TD: torch.Tensor, grads: Sequence[torch.Tensor], out: torch.Tensor | None, start: int
    ) -> None:
        """Add a chunk to the gradients of the adapters. Write the gradient of the input to `out` if it is given."""
        x_TD = x_TD.to(self.dtype)
        if self.adapters and not self.inners:
            self.inners.append(self._inner(x_TD, start))
        self.to_adapters(x_TD, self.to_input(grads, out, start), start)

    def to_input(self, grads: Sequence[torch.Tensor], out: torch.Tensor | None, start: int) -> Half:
        """Run the half of a chunk's backward that needs no input: write its gradient to `out` if that is given."""
        half = self._begin([grad.to(self.dtype) for grad in grads])
        if out is None:
            return half
        grad_x = out if out.dtype == self.dtype else torch.empty_like(out, dtype=self.dtype)
        if half.outer_TR is not None and self.adds:
            self._write_updates(half.outer_TR, grad_x, start)
        for number, (grad, weight) in enumerate(zip(half.grads, self.weights, strict=True)):
            grad_x.addmm_(grad, weight, beta=int(self.adds or number > 0))
        if grad_x is not out:
            out.copy_(grad_x)
        return half

    def to_adapters(self, x_TD: torch.Tensor, half: Half, start: int) -> None:
        """Run the other half of a chunk's backward: add to the gradients of the adapters."""
        if half.outer_TR is None:
            return
        x_TD = x_TD.to(self.dtype)
        if half.inner_TR is None:
            inner_TR = self._inner(x_TD, start)
            for adapter in self.adapters:
                self._add_to_lora_B(adapter, half.grads[adapter.layer], inner_TR)
        outer_TR = self._times_rows(half.outer_TR, start)
        if self._bits is not None:
            grad_A = launches.dropped_grad_A(outer_TR, x_TD, self._bits[:, start : start + len(x_TD)])
            return _add_to(self._grad_As, self.adapters[0].layer, grad_A)
        for group in self._groups:
            pair = outer_TR[:, group.ranks], group.input(x_TD, start)
            _add_to(self._grad_As, group.layer, _product(*pair, wide=self._wide))

    def _begin(self, grads: list[torch.Tensor]) -> Half:
        """Multiply the gradients of the outputs with `lora_B`, and with the forward's `inners` if there are some."""
        if not self.adapters:
            return Half(grads)
        inner_TR = self.inners.pop(0) if self.inners else None
        outer_TR = grads[0].new_empty(len(grads[0]), self.adapters[-1].ranks.stop)
        for adapter in self.adapters:
            grad, outer = grads[adapter.layer], outer_TR[:, adapter.ranks]
            if inner_TR is not None and launches.takes(grad, outer.shape[1]):
                dtype = torch.float32 if self._wide else self.dtype
                both = grad, adapter.B, inner_TR[:, adapter.ranks], outer, adapter.scaling, dtype
                _add_to(self._grad_Bs, adapter.layer, launches.gradient_products(*both))
                continue
            outer.addmm_(grad, adapter.B, beta=0, alpha=adapter.scaling)
            if inner_TR is not None:
                self._add_to_lora_B(adapter, grad, inner_TR)
        return Half(grads, outer_TR, inner_TR)

    def _add_to_lora_B(self, adapter: _Adapter, grad: torch.Tensor, inner_TR: torch.Tensor) -> None:
        pair = inner_TR[:, adapter.ranks], grad
        # On a CPU products with the wide dimension last are faster.
        pair = pair if devices.is_cpu(grad.device) else pair[::-1]
        _add_to(self._grad_Bs, adapter.layer, _product(*pair, wide=self._wide))

    def _write_updates(self, outer_TR: torch.Tensor, grad_x: torch.Tensor, start: int) -> None:
        """Write what the adapters add to the gradient of the input `(T, D)`."""
        if self._bits is not None:
            return launches.dropped_grad_x(outer_TR, self.As_RD, self._bits[:, start : start + len(grad_x)], grad_x)
        for number, group in enumerate(self._groups):
            outer, A_RD, mask = outer_TR[:, group.ranks], self.As_RD[group.ranks], group.mask_at(start, len(grad_x))
            if mask is None:
                grad_x.addmm_(outer, A_RD, beta=int(number > 0))
            elif number > 0:
                grad_x.addcmul_(outer @ A_RD, mask)
            else:
                torch.mm(outer, A_RD, out=grad_x).mul_(mask)

    def _times_rows(self, outer_TR: torch.Tensor, start: int) -> torch.Tensor:
        """Multiply the rows of a chunk's `outer_TR` by the factors that the rows of the input lack; round once."""
        if self._scales is None:
            return outer_TR
        rows = self._scales.rows[start : start + len(outer_TR)]
        return torch.mul(outer_TR, rows, out=torch.empty_like(outer_TR))

    def adapter_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of `lora_A` and `lora_B` of each layer in turn."""
        if self._scales is not None:
            for grad_A in self._grad_As.values():
                grad_A.mul_(self._scales.features)
        found: list[torch.Tensor | None] = [None, None] * len(self.weights)
        for adapter in self.adapters:
            number, grad_B = adapter.layer, self._grad_Bs[adapter.layer]
            alone = self._groups is self.adapters
            grad_A = self._grad_As[number] if alone else self._grad_As[self._groups[0].layer][adapter.ranks]
            found[2 * number] = grad_A.to(adapter.lora_A.dtype)
            found[2 * number + 1] = (grad_B.T if devices.is_cpu(grad_B.device) else grad_B).to(adapter.lora_B.dtype)
        return found
