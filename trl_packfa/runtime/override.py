"""A `forward` put on one module instance in the place of its class's, and the way back.

Plain objects instead of closures, so that a patched model can be deep-copied and pickled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn


class Override:
    """A `forward` of one instance and the way back to what it replaced."""

    __call__: Callable[..., Any]

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None) -> None:
        self.module, self.original = module, original

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward; the class's own is looked up now, as FSDP2 exchanges an instance's class."""
        if self.original is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    def as_forward(self) -> Callable[..., Any]:
        """What stands in the module's slot: this override's bound `__call__`, or itself where it has a signature."""
        # torch.compile guards an instance's forward by identity, but a bound method by its code: so the layers of a
        # model share one graph, where each override object would ask for one of its own. A signature of its own is
        # read from the object, and only a whole model's forward has one.
        return self if hasattr(self, "__signature__") else self.__call__


def override_in(module: nn.Module, slot: str = "forward") -> Override | None:
    """The override in a module's slot, `None` if its forward is another."""
    forward = vars(module).get(slot)
    owner = forward.__self__ if type(forward) is MethodType else forward
    return owner if isinstance(owner, Override) else None


def runs_own_forward(module: nn.Module) -> bool:
    """Check that a call of a module runs its class's forward, or an override of ours in its place, and nothing else.

    Hooks, a `forward` that somebody has set on the instance, before our override or over it, and a compiled call of
    its own are other code: whoever computes a module's result from its weights alone would skip them.
    """
    # Read for each layer and call, so in one expression on the instance's own namespace.
    own = vars(module)
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "_hf_hook" in own
        or own.get("_compiled_call_impl") is not None
        or ("forward" in own and _is_foreign(module, own["forward"]))
    )


def _is_foreign(module: nn.Module, forward: Any) -> bool:
    """Check whether what stands in an instance's `forward` is neither an override of the class's nor the class's."""
    override = override_in(module)
    if override is not None:
        forward = override.original
    # accelerate leaves the class's own behind, bound, where it takes its hook off a module.
    is_own = getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
    return forward is not None and not is_own


def has_library_forward(module: nn.Module) -> bool:
    """Check that the forward of a module's class is the one of its file: nobody has put another on the class."""
    forward = type(module).forward
    return (
        isinstance(forward, FunctionType)
        and forward.__globals__ is vars(sys.modules[type(module).__module__])
        and forward.__code__.co_name == "forward"
    )


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
