"""Trace documents through a model, layer by layer, and give every layer the same input as in another run.

A document alone and packed is rounded differently, and a deep model in half precision amplifies that: after thirty
layers the hidden states of two exact runs may differ widely. So in the packed run each layer gets the input that it
had when the document ran alone, and its output differs by the rounding of one layer. Gradients flow as if no input had
been replaced.

Shape letters: B rows, L row length, S documents, n tokens of one of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from transformers.modeling_layers import GradientCheckpointingLayer

from ..patching.state import PatchState
from .runs import Arrangement, Key, Run, Trace

_ROUTERS = re.compile(r"router|topk|gate$", re.IGNORECASE)
_ROUTER_NAMES = ("gate", "router", "wg", "gate_network")
# A choice that changes in one of so many runs, whose inputs are off by up to so many last places, is near a tie.
_TIES_DRAWN, _TIE_PLACES = 32, 4.0


class TracedParts(NamedTuple):
    """The modules of a model that are traced, by name."""

    layers: dict[str, nn.Module]
    mixers: dict[str, nn.Module]
    routers: dict[str, nn.Module]

    def without(self, names: Iterable[str]) -> TracedParts:
        """Return the parts without the layers of these names and all modules in them."""
        out = tuple(f"{name}." for name in names)
        return TracedParts(*({n: m for n, m in part.items() if not f"{n}.".startswith(out)} for part in self))


def find_traced(model: nn.Module, state: PatchState) -> TracedParts:
    """Return decoder layers, token mixers and routers of a patched model."""
    mixing = {id(module) for module in (*state.parts.attention.values(), *state.parts.mixers.values())}
    named = dict(model.named_modules())
    layers: dict[str, nn.Module] = {
        name: module for name, module in named.items() if isinstance(module, GradientCheckpointingLayer)
    }
    if not layers:  # older code: the longest list of modules that hold token mixers
        lists = [(name, module) for name, module in named.items() if isinstance(module, nn.ModuleList)]
        lists = [item for item in lists if any(id(inner) in mixing for inner in item[1].modules())]
        name, longest = max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))
        layers = {f"{name}.{i}": layer for i, layer in enumerate(longest)}
    return TracedParts(
        layers=layers,
        mixers={name: module for name, module in named.items() if id(module) in mixing},
        routers={
            name: module
            for name, module in named.items()
            if name.rpartition(".")[2] in _ROUTER_NAMES or _ROUTERS.search(type(module).__name__)
        },
    )


class _HandOver(Function):
    """Replacement of a tensor by another value; gradients flow to the replaced tensor."""

    @staticmethod
    def forward(ctx: Any, natural: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Following:
    """One forward whose documents are traced.

    The inputs in `handed` replace those of its layers and routers, and what routers choose there replaces their
    choices. With `free` those of the layers alone are replaced, and mixers' inputs are traced, too. `traces` get the
    layers' own inputs, and the own outputs of mixers and routers; those of a router are as in `handed` at tokens whose
    choice is near a tie.
    """

    def __init__(self, arrangement: Arrangement, handed: Run, *, free: bool = False) -> None:
        self.arrangement, self.places, self.shape = arrangement, arrangement.places, arrangement.shape
        self.handed, self.free = handed, free
        self.traces: dict[int, Trace] = {document: {} for document in self.places}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._routers: frozenset[str] = frozenset()
        self._inside: frozenset[str] = frozenset()  # modules in layers whose inputs are only compared

    @contextmanager
    def attached(self, parts: TracedParts) -> Iterator[None]:
        """Trace the forward in a `with` block; it may run only one."""
        # Rounding may send single tokens, near a tie of two experts, to another one, and their gradients would be
        # completely different. So routers get the choice of the reference, and their own choice is only compared.
        # Mixers and routers in a checkpointed layer run again in the backward. Their keys count that as a second call,
        # packed and alone, so the recomputation gets the same inputs as well.
        self._routers = frozenset(parts.routers)
        entered = parts.routers | parts.mixers if self.free else parts.routers
        self._inside = frozenset(entered) - parts.layers.keys() if self.free else frozenset()
        with ExitStack() as hooks:
            for name, module in {**parts.layers, **entered}.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            for name, module in {**parts.routers, **parts.mixers}.items():
                kind = "left" if name in parts.mixers else "routed"
                hooks.enter_context(module.register_forward_hook(partial(self._leave, name, kind), with_kwargs=True))
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._key("entered", name)
        if self.free and name in self._routers and sum(map(self._is_per_token, (*args, *kwargs.values()))) > 1:
            return None  # a gate between two states: what it does with the same one depends on the other
        if args and self._is_per_token(args[0]):
            return (self._pass(key, args[0]), *args[1:]), kwargs
        if self._is_per_token(kwargs.get("hidden_states")):
            return args, {**kwargs, "hidden_states": self._pass(key, kwargs["hidden_states"])}
        return None

    def _leave(
        self, name: str, kind: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        key = self._key(kind, name)
        # A mixer's other outputs are weights or caches; a router's are scores, weights and chosen experts.
        if kind == "left":
            first = output[0] if isinstance(output, (tuple, list)) else output
            if self._is_per_token(first):
                self._pass(key, first)
            return None
        items = list(output) if isinstance(output, (tuple, list)) else [output]
        traced = {key._replace(tensor=i): item for i, item in enumerate(items) if self._is_per_token(item)}
        for own, item in traced.items():
            items[own.tensor] = self._pass(own, item)
        if type(module) is not nn.Linear:
            self._forget_ties(list(traced), module, args, kwargs)
        if self.free:
            return None
        return type(output)(items) if isinstance(output, (tuple, list)) else items[0]

    @torch.no_grad()
    def _forget_ties(self, keys: list[Key], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the traces of a router hold what was handed at tokens whose choice is another one, but near a tie.

        There rounding of the router's input changes the choice: the module runs a few times with other last places.
        """
        traces = {i: (self.handed[i].trace, own) for i, own in self.traces.items() if i in self.handed}
        given = {
            i: other
            for i, (other, own) in traces.items()
            if all(key in other and other[key].shape == own[key].shape for key in keys)
        }
        if not given or not keys:
            return
        states = args[0] if args else kwargs.get("hidden_states")
        place = torch.cat([self.places[i] for i in given])
        with torch.autocast(place.device.type, enabled=False):  # on a CPU it cannot concatenate float16
            sides = ([torch.cat([side[i][key] for i in given]) for key in keys] for side in (self.traces, given))
            other = _changed(*map(_choices, sides))
        if other is None or not bool(other.any()) or not isinstance(states, torch.Tensor):
            return

        def choose(states: torch.Tensor) -> list[torch.Tensor]:
            # Not `module(...)`: its hooks, ours too, belong to the run that is traced.
            named = kwargs if args else {**kwargs, "hidden_states": states}
            found = module.forward(*(states, *args[1:])[: len(args)], **named)
            items = list(found) if isinstance(found, (tuple, list)) else [found]
            return _choices([self._flat(item)[place] for item in items if self._is_per_token(item)])

        usual, tied = choose(states), torch.zeros_like(other)
        by = _TIE_PLACES * max(torch.finfo(dtype).eps for dtype in {states.dtype, *_dtypes(module)})
        for _ in range(_TIES_DRAWN):
            moved = torch.addcmul(states, states, torch.empty_like(states).uniform_(-by, by))
            changed = _changed(choose(moved), usual)
            tied = tied if changed is None else tied | changed
            if bool(tied[other].all()):
                break
        for (i, trace), at in zip(
            given.items(), (tied & other).split([len(self.places[i]) for i in given]), strict=True
        ):
            if bool(at.any()):
                for key in keys:
                    self.traces[i][key][at] = trace[key][at].to(self.traces[i][key].dtype)

    def _key(self, kind: str, name: str) -> Key:
        self._calls[kind, name] += 1
        return Key(kind, name, self._calls[kind, name] - 1)

    def _is_per_token(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return False
        rows, length = self.shape
        # Routers get their tokens as `(B * L, D)`.
        return value.shape[:2] == self.shape or value.shape[0] == rows * length

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor per token as `(B * L, ...)`."""
        return tensor.flatten(0, 1) if tensor.shape[:2] == self.shape else tensor

    def _pass(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Store each document's part of a tensor `(B, L, ...)` or `(B * L, ...)`, and replace its inputs."""
        flat = self._flat(tensor)
        # A mixer's output is only compared, never replaced: a replaced output would hide its error.
        keeps = key.kind == "left" or key.module in self._inside
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for document, place in self.places.items():
            # Indexing makes a copy, so a trace does not keep the whole batch in memory.
            own = self.traces[document][key] = flat.detach()[place]
            given = None if keeps else self.handed.get(document)
            value = None if given is None else given.trace.get(key)
            if value is not None and value.shape == own.shape:
                found.append((place, value.to(flat.dtype)))
        if not found:
            return tensor
        values = flat.detach().clone()
        for place, value in found:  # one by one, as autocast on a CPU cannot concatenate float16
            values[place] = value
        values = values.view(tensor.shape)
        # Returning `values` alone would cut the graph, and gradients would end at each layer.
        return _HandOver.apply(tensor, values) if tensor.requires_grad else values  # type: ignore[return-value]


def _choices(items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what is discrete in a router's outputs: the numbers of experts, or else which scores are 0 or masked."""
    numbers = [item for item in items if not item.is_floating_point()]
    return numbers or [(item == 0) | ~item.isfinite() for item in items]


def _changed(choices: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the tokens `(B * L,)` whose choices differ; `None` if the two have other shapes."""
    if not choices or [one.shape for one in choices] != [other.shape for other in others]:
        return None
    return torch.stack([(a != b).flatten(1).any(1) for a, b in zip(choices, others, strict=True)]).any(0)


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
