"""What is compiled and what is not.

A patched backbone is one graph, whatever its batch's documents: the call around it, which finds them, runs outside,
and layers are handed the layout, of which a graph reads sizes that may change (`attention/in_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_graphs(function: Function) -> Function:
    """`torch.compiler.disable`, which hides a function's type: neither it nor what it calls is compiled."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def around_graphs(function: Function) -> Function:
    """Not compiled itself, as it looks at every batch's documents or at context variables; what it calls is."""
    return torch.compiler.disable(function, recursive=False)  # type: ignore[return-value]


def let_sizes_change(tensors: Iterable[torch.Tensor]) -> None:
    """Tell compilers before their first graph that no batch has the sizes of another; a size of 1 may stay one."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.dim())))


def constant_in_graphs(function: Function) -> Function:
    """A function of constants that is called while a graph is traced, and whose result is part of the graph."""
    return torch._dynamo.assume_constant_result(function)
