"""What stays outside of compiled graphs: code whose shapes follow every batch's documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_graphs(function: Function) -> Function:
    """`torch.compiler.disable`, which hides a function's type. Compiled, each batch would be a recompilation."""
    return torch.compiler.disable(function)  # type: ignore[return-value]
