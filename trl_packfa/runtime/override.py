"""A `forward` put on one module instance in the place of its class's, and the way back.

Plain objects instead of closures, so that a patched model can be deep-copied and pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn


class Override:
    """A `forward` of one instance and the way back to what it replaced."""

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None) -> None:
        self.module, self.original = module, original

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward; the class's own is looked up now, as FSDP2 exchanges an instance's class."""
        if self.original is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)


def computes_as(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module's forward is, instruction by instruction, another class's, as copies of it in many
    architectures are, and nothing is in its place on the instance."""
    # By bytecode, not by class: transformers copies a norm or an MLP into each architecture under another name.
    code = getattr(type(module).forward, "__code__", None)
    return (
        code is not None and "forward" not in vars(module) and _instructions(code) == _instructions(forward.__code__)
    )


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """What a function computes with, whatever its docstring says."""
    # Docstrings are among a function's constants, and copies differ in them.
    return code.co_code, code.co_names, tuple(value for value in code.co_consts if not isinstance(value, str))


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Of a module's own forward, for what stands in its place: `generate()` reads the parameters."""
    # Without `self`: what is set on an instance is called without it.
    return inspect.Signature(list(inspect.signature(type(module).forward).parameters.values())[1:])
