"""Put a `forward` on one module instance in the place of its class's, and take it back.

Overrides are plain objects, not closures, so that a patched model can be deep-copied and pickled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def forward_slot(module: nn.Module) -> str:
    """Return the attribute that holds the real forward: accelerate's device hooks move it to `_old_forward`."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


class Override:
    """A `forward` of one instance, with the forward that it replaced.

    By default that is the one that was set on the instance before, or its class's (`None`).
    """

    __call__: Callable[..., Any]

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.original = vars(module).get(forward_slot(module)) if original is None else original

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replaced forward, or the class's own as it is now: FSDP2 exchanges an instance's class."""
        if self.original is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    def as_edit(self) -> tuple[nn.Module, str, Callable[..., Any]]:
        """Return module, slot and the slot's value: the bound `__call__`, or the override if it has a signature."""
        # torch.compile guards an instance's forward by identity, but a bound method by its code. With bound methods
        # the layers of a model share one graph, while each override object would need its own. A signature is read
        # from the object itself, and only a whole model's forward has one.
        value = self if hasattr(self, "__signature__") else self.__call__
        return self.module, forward_slot(self.module), value


class NamedOverride(Override):
    """An override that reads its call's arguments by name.

    `names` are those of the parameters of the class's forward. It takes further keywords if `takes_any`.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None = None) -> None:
        super().__init__(module, original)
        parameters = forward_signature(module).parameters
        self.names = tuple(parameters)
        self.takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name."""
        return named_arguments(self.names, args, kwargs)


def named_arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name; `names` are those of the function's parameters."""
    # Not `zip`: torch 2.7 cannot trace its `strict`.
    return {**{name: args[i] for i, name in enumerate(names[: len(args)])}, **kwargs}


@contextmanager
def attributes_set(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, given as (object, name, value), inside a `with` block; then objects are as they were."""
    with ExitStack() as undo:
        for owner, name, value in changes:
            before, is_own = getattr(owner, name, None), name in vars(owner)
            setattr(owner, name, value)
            undo.callback(_put_back, owner, name, before, is_own)
        yield


def _put_back(owner: Any, name: str, value: Any, is_own: bool) -> None:
    if name in vars(owner) and not is_own:
        delattr(owner, name)  # the class's value is in use again
    else:  # the object's own, or that of a property or of a module's parameters
        setattr(owner, name, value)


def set_inside(owner: Any, **values: Any) -> AbstractContextManager[None]:
    """Set attributes of one object inside a `with` block."""
    return attributes_set((owner, name, value) for name, value in values.items())


def override_in(module: nn.Module, slot: str = "forward") -> Override | None:
    """Return the override in a module's slot, `None` if the slot holds none of ours."""
    forward = vars(module).get(slot)
    owner = forward.__self__ if type(forward) is MethodType else forward
    return owner if isinstance(owner, Override) else None


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of a module's own calls and of their backwards."""
    return [hook for name in _HOOKS for hook in vars(module)[name].values()]


def runs_own_forward(module: nn.Module) -> bool:
    """Tell whether a call of a module runs only its class's forward, or our override in its place.

    Hooks, a `forward` that others have set on the instance before or after ours, and a compiled call are other code.
    Code that computes a module's result from its weights alone would skip them.
    """
    # This runs for each layer and call, so it is one fast expression on the instance's own namespace.
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
    """Tell whether an instance's `forward` is neither an override of the class's forward nor the class's forward."""
    override = override_in(module)
    if override is not None:
        forward = override.original
    # When accelerate takes its hook off a module, it leaves the class's own forward there as a bound method.
    is_own = getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
    return forward is not None and not is_own


def has_library_forward(module: nn.Module) -> bool:
    """Tell whether the forward of a module's class is the one in its file, and nobody has set another on the class."""
    forward = type(module).forward
    return (
        isinstance(forward, FunctionType)
        and forward.__globals__ is vars(sys.modules[type(module).__module__])
        and forward.__code__.co_name == "forward"
    )


def computes_as(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Tell whether a module computes the function `forward`: its class's forward has the same bytecode.

    The instance must have no forward of its own. This finds copies of one forward in many architectures.
    """
    # Classes do not tell: transformers copies a norm or an MLP into each architecture under another name.
    code = getattr(type(module).forward, "__code__", None)
    return (
        code is not None and "forward" not in vars(module) and _instructions(code) == _instructions(forward.__code__)
    )


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return bytecode, names and constants of a function, without strings."""
    # Strings are left out because docstrings are constants, too, and copies have other docstrings.
    return code.co_code, code.co_names, tuple(value for value in code.co_consts if not isinstance(value, str))


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of the forward of a module's class, without `self`.

    An override carries it as `__signature__`, as `generate()` reads which parameters a model's forward takes.
    """
    # A function that is set on an instance is called without `self`.
    return inspect.Signature(list(inspect.signature(type(module).forward).parameters.values())[1:])
