"""What is compiled and what is not.

A patched backbone is one graph, whatever its batch's documents: the call around it, which finds them, runs outside,
and layers are handed the layout, of which a graph reads sizes that may change (`attention/custom_op.py`). Compiled by
layer, as the trainer does, layers of one kind share a graph: what is compiled does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

# With gradients and without, and of either one graph for the sizes that came first and one for any size.
_GRAPHS_OF_A_LAYER = 4


def outside_of_graphs(function: Function) -> Function:
    """torch.compile compiles neither this function nor what it calls: `torch.compiler.disable`, with its type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def around_graphs(function: Function) -> Function:
    """Not compiled itself, as it looks at every batch's documents or at context variables; what it calls is."""
    return torch.compiler.disable(function, recursive=False)  # type: ignore[return-value]


def mark_dynamic(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch.compile before its first graph that all sizes of these tensors change from batch to batch.

    Without it Dynamo makes the first graph for the sizes of the first batch, and a second one when a batch differs.
    """
    # `maybe_`: where a model's code needs a certain size, `mark_dynamic` would raise. A size of 1 stays 1.
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.dim())))


def constant_in_graphs(function: Function) -> Function:
    """A function of constants that is called while a graph is traced, and whose result is part of the graph."""
    return torch._dynamo.assume_constant_result(function)


def allow_graphs_of_layers(layers: int) -> AbstractContextManager[None]:
    """For the length of a `with` block torch compiles as many graphs of one function as that many layers need.

    A graph that is cut at every layer, as under FSDP2, is another one for each: what stands in a layer's place is
    told apart by identity. Past torch's limit, eight, the other layers would run uncompiled.
    """
    return allow_graphs(_GRAPHS_OF_A_LAYER * layers)


@contextmanager
def allow_graphs(most: int) -> Iterator[None]:
    """For the length of a `with` block torch compiles that many graphs of one function: the limits of
    `torch._dynamo.config` are raised, and put back. Higher limits stay."""
    # Dynamo checks both: graphs of one code object that are valid together (8), and all that were ever made of it
    # (256). Past either it runs the code eagerly, with a warning in its log at most.
    names = ("recompile_limit", "accumulated_recompile_limit")
    limits = {name: max(getattr(torch._dynamo.config, name), most) for name in names}
    with torch._dynamo.config.patch(**limits):
        yield


class CompiledLayer:
    """The compiled call of one layer, which is told before its first graph that rows may have other lengths.

    Args:
        layer (`torch.nn.Module`):
            Whose call is compiled, with its hooks.
        options (`dict[str, Any]`):
            Arguments of `torch.compile`.
    """

    # Where `torch.nn.Module.compile` keeps a module's compiled call; copies of a module go without it.
    SLOT = "_compiled_call_impl"

    def __init__(self, layer: nn.Module, options: dict[str, Any]) -> None:
        self._call = torch.compile(layer._call_impl, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's call."""
        # `(B, L, ...)`, of the hidden states and of the rotary embedding's tables.
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, [0, 1])
        return self._call(*args, **kwargs)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """For the length of a `with` block a compiled model runs as if it were not. What is compiled by itself, as
    flex_attention's kernel, still is."""
    # torch's `OptimizedModule` keeps the compiled call on the instance, as `forward`, and the model as `_orig_mod`.
    compiled = [(part, name, vars(part)[name]) for part, name in _compiled_parts(model)]
    for part, name, _ in compiled:
        setattr(part, name, _own_call(part) if name == "forward" else None)
    try:
        yield
    finally:
        for part, name, call in compiled:
            setattr(part, name, call)


def runs_compiled(model: nn.Module) -> bool:
    """Whether a call of this model runs graphs."""
    return any(_compiled_parts(model))


def _compiled_parts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules whose calls are compiled, and where each keeps its compiled call."""
    if hasattr(model, "_orig_mod") and vars(model)["forward"] != _own_call(model):
        yield model, "forward"
    for module in model.modules():
        if vars(module).get(CompiledLayer.SLOT) is not None:
            yield module, CompiledLayer.SLOT


def _own_call(model: Any) -> Any:
    return model._orig_mod.__call__
