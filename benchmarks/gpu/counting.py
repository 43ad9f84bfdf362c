"""Counts of the operators that a device runs: their arithmetic, their bytes, and the storages that are alive.

An operator takes the longer one of arithmetic / rate and bytes / bandwidth.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trl_packfa.bench.measuring import WAITS

_BLOCK = 512  # bytes: torch's allocator rounds up to it
_NARROW = 64  # a product with a side of at most so many features is one of an adapter
_aten: Any = torch.ops.aten


class Device(NamedTuple):
    """Rates that a GPU reaches in such work; not those of its data sheet."""

    name: str
    products: float  # operations a second of large products in bfloat16
    bandwidth: float  # bytes a second
    attention: tuple[float, float]  # operations a second of FlashAttention 2, forward and backward
    integers: float  # integer operations a second


# Copies and products of 8,192 squared reach these on an H100; an H200 has the same cores and a faster memory. Integers
# are by the data sheet: 132 multiprocessors of 64 operations in each of 1.755e9 cycles a second.
H100 = Device("H100", 700e12, 2.8e12, (310e12, 266e12), 14.8e12)
H200 = Device("H200", 700e12, 3.9e12, (310e12, 266e12), 14.8e12)


@dataclass
class Operator:
    """An operator that a device runs: one launch or a few."""

    kind: str  # product, adapter product, attention, attention backward, dequantize, dropout, fused or elementwise
    flops: float
    bytes: int

    def seconds(self, on: Device) -> float:
        """Return the time that arithmetic or memory allows."""
        rate = on.products
        if self.kind.startswith("attention"):
            rate = on.attention[self.kind.endswith("backward")]
        elif self.kind == "dropout":
            rate = on.integers
        return max(self.flops / rate, self.bytes / on.bandwidth)


@dataclass
class Counted:
    """The counts of one micro-batch."""

    operators: list[Operator] = field(default_factory=list)
    forward: int = 0  # operators of the forward
    calls: int = 0  # dispatched calls, views included
    waits: int = 0  # of the host for the device
    peak_bytes: int = 0
    kept_bytes: int = 0  # by the forward for the backward, weights not included
    weight_bytes: int = 0

    def seconds(self, on: Device) -> float:
        return sum(operator.seconds(on) for operator in self.operators)

    def by_kind(self, on: Device) -> dict[str, float]:
        """Return the seconds of each kind of operator."""
        total: dict[str, float] = {}
        for operator in self.operators:
            total[operator.kind] = total.get(operator.kind, 0.0) + operator.seconds(on)
        return total


class Recorder(TorchDispatchMode):
    """Dispatch mode that counts the operators of a device, and follows the bytes of live storages."""

    def __init__(self, documents: Sequence[int], *, attention_speed: float = 1.0) -> None:
        super().__init__()
        self.counted, self.live = Counted(), 0
        self._pairs = sum(n * n for n in documents) / 2 / attention_speed  # of a query and a key, causal
        self._followed: dict[int, Any] = {}
        self._inside = 0  # of a kernel that counts as one operator

    def follow(self, tensors: Any) -> None:
        """Follow the storages of tensors to their end."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._followed:
                    size = -(-storage.nbytes() // _BLOCK) * _BLOCK
                    self._followed[key] = weakref.finalize(storage, self._free, key, size)
                    self.live += size
        if not self._inside:
            self.counted.peak_bytes = max(self.counted.peak_bytes, self.live)

    def _free(self, key: int, size: int) -> None:
        del self._followed[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "bitsandbytes::gemm_4bit":
            with self:
                return _product_in_4_bits(*args)
        result = self._run(func, args, kwargs)
        if not self._inside:
            self.counted.calls += 1
            self.counted.waits += func._schema.name in WAITS
            if _launches(func, result):
                self._note(func, args, kwargs, result)
        self.follow(result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fakes. Every position is trained, so a mask selects all rows."""
        packet = func._overloadpacket
        if packet is _aten.index and args[1][0] is not None and args[1][0].dtype == torch.bool:
            self.counted.waits += 1  # the indices of the mask
            x, mask = args[0], args[1][0]
            return x.new_empty((mask.numel(), *x.shape[mask.dim() :]))
        if packet is _aten.masked_select:
            return args[0].new_empty((args[0].numel(),))
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        packet = getattr(_aten, name.removeprefix("aten::").rstrip("_"), None)  # in place, it computes the same
        kind, flops = "elementwise", 0.0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            sides = [n for x in tree_leaves(args) if isinstance(x, torch.Tensor) for n in x.shape[-2:]]
            kind = "adapter product" if min(sides) <= _NARROW else "product"
        elif name.startswith("torch_attn::"):
            query = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim() == 3)
            kind = "attention backward" if name.endswith("backward") else "attention"
            flops = 4 * self._pairs * query.shape[1] * query.shape[2] * (2.5 if name.endswith("backward") else 1)
        elif "dequantize" in name:
            kind = "dequantize"
        writes_only = name in _WRITES_ONLY or kwargs.get("beta") == 0
        given = (args[1:] if writes_only else args, {k: v for k, v in kwargs.items() if k != "out"})
        moved = (given, result)
        # Of the table only the elements at the index are read or written: as many as there are in the index, or rows.
        if packet in _AT_INDEX:
            moved = (args[2:], args[2:])
        elif packet is _aten.embedding:
            moved = (args[1:], result, result)
        self.add(kind, flops, moved)

    def add(self, kind: str, flops: float, moved: Any) -> None:
        """Count one operator, which reads or writes each of these tensors once."""
        self.counted.operators.append(Operator(kind, flops, sum(map(_bytes, tree_leaves(moved)))))

    def as_one(
        self,
        function: Callable[..., Any],
        moved: Callable[..., Any],
        kind: str = "fused",
        operations: Callable[..., float] | None = None,
    ) -> Any:
        """Return a function whose operators count as one, which moves the tensors `moved(args, result)`.

        Several operators are a list of their tensors. `operations(*args)` is the arithmetic of the first one, if it
        may take longer.
        """

        def call(*args: Any, **options: Any) -> Any:
            self._inside += 1
            try:
                result = function(*args, **options)
            finally:
                self._inside -= 1
            found, flops = moved(args, result), 0.0 if operations is None else operations(*args)
            first, *sums = found if isinstance(found, list) else [found]
            self.add(kind, flops, first)
            for tensors in sums:
                self.add(kind, 0.0, tensors)
            self.follow(())
            return result

        return call


def _product_in_4_bits(x: torch.Tensor, packed: torch.Tensor, shape: Any, absmax: torch.Tensor, *options: Any) -> Any:
    """Multiply as bitsandbytes does on CUDA with more than 1,536 rows: with the weight in half precision."""
    weight = torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, *options[:2], shape, x.dtype)
    return torch.mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])


# Calls that allocate, or that only look at a tensor in another way, and so launch nothing.
_NOTHING = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.detach,
    _aten._unsafe_view, _aten.lift_fresh, _aten.is_same_size, _aten._local_scalar_dense, _aten.alias,
}  # fmt: skip
_AT_INDEX = (_aten.gather, _aten.scatter)
_WRITES_ONLY = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::bernoulli_")


def _launches(func: Any, result: Any) -> bool:
    makes = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
    return makes and not func.is_view and func._overloadpacket not in _NOTHING


def _bytes(tensor: Any) -> int:
    """Return the bytes that a pass over a tensor moves; expanded ones are read once."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
