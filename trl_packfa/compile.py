"""Helpers for torch.compile: they decide what is compiled and what is not.

A patched backbone is one graph for all batches, and the call around it, which finds the documents, runs outside of the
graph. The trainer compiles layer by layer: layers of one kind share a graph, so more layers do not need more graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from .override import attributes_set

Function = TypeVar("Function", bound=Callable[..., Any])

# With gradients and without, and for each a graph for the first sizes and one for any size.
_GRAPHS_OF_A_LAYER = 4


def outside_of_graphs(function: Function) -> Function:
    """Keep torch.compile from compiling this function and what it calls: `torch.compiler.disable`, with its type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def around_graphs(function: Function) -> Function:
    """Keep torch.compile from compiling this function itself; the functions that it calls may be compiled.

    Such a function reads every batch's documents or context variables.
    """
    return torch.compiler.disable(function, recursive=False)  # type: ignore[return-value]


def mark_dynamic(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch.compile, before its first graph, that all sizes of these tensors change from batch to batch.

    Without this Dynamo makes the first graph for the sizes of the first batch, and a second one for other sizes.
    """
    # `mark_dynamic` would raise where a model's code needs a fixed size; `maybe_` does not. A size of 1 stays 1.
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.dim())))


def constant_in_graphs(function: Function) -> Function:
    """Let a graph call this function while it is traced and keep its result as a constant."""
    return torch.compiler.assume_constant_result(function)


def allow_graphs_of_layers(layers: int) -> AbstractContextManager[None]:
    """Let torch compile as many graphs of one function as this many layers need, inside a `with` block.

    A graph that is cut at every layer, as under FSDP2, gives another graph for each layer, because the layers'
    overrides are told apart by identity. Beyond torch's limit of eight graphs the other layers would run uncompiled.
    """
    return allow_graphs(_GRAPHS_OF_A_LAYER * layers)


@contextmanager
def allow_graphs(most: int) -> Iterator[None]:
    """Let torch compile this many graphs of one function, inside a `with` block.

    It raises the limits of `torch._dynamo.config` and restores them afterwards. Higher limits stay.
    """
    # Dynamo checks two limits for a code object: graphs that are valid together (8), and graphs that were ever made
    # (256). Beyond either it runs the code eagerly, with at most a warning in its log.
    names = ("recompile_limit", "accumulated_recompile_limit")
    limits = {name: max(getattr(torch._dynamo.config, name), most) for name in names}
    with torch._dynamo.config.patch(**limits):
        yield


class CompiledLayer:
    """The compiled call of one layer, with its hooks, whose inputs are marked as dynamic before the first graph."""

    # The attribute in which `torch.nn.Module.compile` keeps a module's compiled call. Copies of a module lack it.
    SLOT = "_compiled_call_impl"

    def __init__(self, layer: nn.Module, options: dict[str, Any]) -> None:
        self._call = torch.compile(layer._call_impl, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's compiled call."""
        # The hidden states and the rotary embedding's tables, `(B, L, ...)`.
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, [0, 1])
        return self._call(*args, **kwargs)


def uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Run a compiled model without compilation inside a `with` block; parts compiled by themselves stay compiled.

    An example of such a part is flex_attention's kernel.
    """
    return attributes_set(_compiled_calls(model))


def runs_compiled(model: nn.Module) -> bool:
    """Tell whether a call of this model runs compiled graphs."""
    return any(_compiled_calls(model))


def _compiled_calls(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield each module whose call is compiled, the attribute that holds that call, and its value without one."""
    # torch's `OptimizedModule` keeps the compiled call on the instance, as `forward`, and the model as `_orig_mod`.
    whole: Any = getattr(model, "_orig_mod", None)
    if whole is not None and vars(model)["forward"] != whole.__call__:
        yield model, "forward", whole.__call__
    for module in model.modules():
        if vars(module).get(CompiledLayer.SLOT) is not None:
            yield module, CompiledLayer.SLOT, None
