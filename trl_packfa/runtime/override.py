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
    """Whether a module computes what the function `forward` does: the forward of its class has the same bytecode, and
    the instance has none of its own. Copies of one forward in many architectures are found so."""
    # By bytecode, not by class: transformers copies a norm or an MLP into each architecture under another name.
    code = getattr(type(module).forward, "__code__", None)
    return (
        code is not None and "forward" not in vars(module) and _instructions(code) == _instructions(forward.__code__)
    )


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Bytecode, names and constants of a function, strings left out."""
    # Docstrings are among a function's constants, and copies differ in them.
    return code.co_code, code.co_names, tuple(value for value in code.co_consts if not isinstance(value, str))


def forward_signature(module: nn.Module) -> inspect.Signature:
    """The signature of the forward of a module's class, without `self`.

    An override carries it as `__signature__`, as `generate()` reads which parameters a model's forward takes.
    """
    # Without `self`: what is set on an instance is called without it.
    return inspect.Signature(list(inspect.signature(type(module).forward).parameters.values())[1:])
