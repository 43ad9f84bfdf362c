"""Counts of the torch operations in one step, which are equal on all machines with the same torch version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trl_packfa.bench.measuring import WAITS, compiled_graphs

_aten: Any = torch.ops.aten
# torch does not count the fused attention of CPUs. Each entry: number of leading operands, and the function to count.
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (3, sdpa_flop_count),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, sdpa_backward_flop_count),
}


class OperationCounter(TorchDispatchMode):
    """Dispatch mode that counts the operations inside its context, forward and backward.

    Attributes:
        calls (`int`): number of aten operations.
        allocated (`int`): bytes of their results, without views and in-place results.
        largest (`int`): bytes of the largest result.
        syncs (`int`): operations that make the host wait for a device.
        flops (`int`): floating point operations of matrix products and attention.
        compiled (`int`): graphs that torch.compile made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.allocated = self.largest = self.syncs = self.flops = self.compiled = 0

    def __enter__(self) -> OperationCounter:
        self._graphs = compiled_graphs()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.compiled += compiled_graphs() - self._graphs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        self.syncs += func._schema.name in WAITS
        self.flops += _flops(func, args, kwargs or {}, result)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given:
                size = leaf.untyped_storage().nbytes()
                self.allocated, self.largest = self.allocated + size, max(self.largest, size)
        return result

    def to_dict(self) -> dict[str, int]:
        return {
            "flops": self.flops, "calls": self.calls, "allocated_bytes": self.allocated, "largest_bytes": self.largest,
            "host_syncs": self.syncs, "recompiles": self.compiled,
        }  # fmt: skip


def kept_bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes of activations that the backward of `forward()` keeps, each storage once.

    Read from the graph of its first result: under hooks on saved tensors, fused LoRA keeps more.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    nodes, kept = [forward()[0].grad_fn], {}
    seen = set(nodes)
    for node in nodes:
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for tensor in tree_leaves([getattr(node, name) for name in names]):
            if isinstance(tensor, torch.Tensor):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        found = dict.fromkeys(parent for parent, _ in node.next_functions if parent is not None and parent not in seen)
        seen.update(found)
        nodes += found
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating point operations of one call; causal attention counts double, as in torch."""
    packet = func._overloadpacket
    if packet in _CPU_ATTENTION:
        operands, count = _CPU_ATTENTION[packet]
        return count(*(tensor.shape for tensor in args[:operands]))
    # torch's table has no operators that work in place (`addmm_`); they compute the same.
    packet = getattr(_aten, func._schema.name.removeprefix("aten::").rstrip("_"), packet)
    return flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
