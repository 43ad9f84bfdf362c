"""Choose the layers that run in measurements of many arrangements.

Code and settings of a layer decide whether it keeps documents apart, and a model repeats few kinds of layers. So on a
CPU a large model, or one whose mixers run document by document (loops over tokens, without kernels), runs one layer of
each kind there, and the others return their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ..override import attributes_set, hooks_of
from ..parallel.zero3 import is_partitioned, whole_size
from ..patching.state import PatchState
from .subject import Subject

# Layers with this many parameters run all arrangements, about ten thousand tokens, in a few seconds on one core.
CHEAP = 4_000_000
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@torch.no_grad()
def layers_to_skip(subject: Subject, run: Callable[[], object]) -> dict[str, tuple[nn.Module, bool]]:
    """Return the layers that repeat the kind of another one, by name, each with whether it returns a tuple.

    There are none if the model is cheap to run, or its layers cannot be left out. `run` runs the model once.
    """
    model, layers = subject.model, subject.parts.layers
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    size = sum(whole_size(parameter) for layer in layers.values() for parameter in layer.parameters())
    if not on_cpu or (size <= CHEAP and not subject.state.parts.mixers) or is_partitioned(model):
        return {}
    kinds, first = _kinds(layers, subject.state), set()
    repeated = {name for name, kind in kinds.items() if kind in first or first.add(kind)}
    returned = _returned({name: layers[name] for name in repeated}, run)
    skipped = {name: (layers[name], returned[name]) for name in repeated if name in returned}
    try:
        with skipping(skipped):
            run()
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError):
        return {}  # a later layer needs something from an earlier one, for example shared keys
    return skipped


def skipping(layers: dict[str, tuple[nn.Module, bool]]) -> AbstractContextManager[None]:
    """Make these layers return their input inside a `with` block."""
    return attributes_set((layer, "forward", partial(_pass, is_tuple)) for layer, is_tuple in layers.values())


def _pass(is_tuple: bool, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return (hidden_states, None) if is_tuple else hidden_states


def _returned(layers: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, bool]:
    """Tell whether each layer that is called once and returns hidden states alone returns them in a tuple."""
    calls: dict[str, list[bool | None]] = {name: [] for name in layers}

    def watch(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        in_tuple = isinstance(output, tuple)
        states, *rest = output if in_tuple else (output,)
        same = isinstance(states, torch.Tensor) and isinstance(given, torch.Tensor) and states.shape == given.shape
        calls[name].append(in_tuple if same and rest in ([], [None]) else None)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(watch, name), with_kwargs=True))
        run()
    return {name: found[0] for name, found in calls.items() if len(found) == 1 and found[0] is not None}


def _kinds(layers: dict[str, nn.Module], state: PatchState) -> dict[str, str]:
    """Describe the kind of each layer as text: classes, forwards, hooks, settings, parameters and windows."""
    parts = state.parts
    windows = {id(module): window for module, window in zip(parts.attention.values(), parts.windows, strict=False)}
    facts = {name: dict(_facts(layer, windows)) for name, layer in layers.items()}
    order = list(enumerate(facts.values()))
    # A number that equals the layer's index is not a setting.
    shared = set.intersection(*(set(found) for found in facts.values()))
    counting = {key for key in shared if all(type(found[key]) is int and found[key] == i for i, found in order)}
    return {name: str([item for item in found.items() if item[0] not in counting]) for name, found in facts.items()}


def _facts(layer: nn.Module, windows: dict[int, int | None]) -> Iterable[tuple[tuple[str, str], Any]]:
    for name, module in layer.named_modules():
        yield (name, "class"), type(module).__qualname__
        yield (name, "forward"), _code(vars(module).get("forward"))
        yield (name, "hooks"), [_code(hook) for hook in hooks_of(module)]
        yield (name, "window"), windows.get(id(module))
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                yield (name, key), value
        for key, parameter in module.named_parameters(recurse=False):
            yield (name, key), [tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad]


def _code(function: Any) -> str:
    """Return where a function's code is, or the class of a callable object."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{type(function).__qualname__} {'' if code is None else (code.co_filename, code.co_firstlineno)}"
