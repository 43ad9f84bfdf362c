"""The `forward`s of modules that mix tokens beside or instead of attention: state, convolutions, positions, indexers.

Each runs document by document, unless its own kernels provably honour the boundaries that it is handed.

Shape letters: B rows, L row length, T packed tokens (B * L), N heads, H head dim.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention import AttentionArguments, BackendChoice
from ..layout import PackedLayout
from ..runtime.compile import outside_of_graphs
from ..runtime.context import current_layout, find_layout, is_empty_mask, packed_call
from ..runtime.override import Override
from ..runtime.per_document import BOUNDARIES, FLASH_KEYS, run_by_document
from ..runtime.random_states import devices_of, random_states_kept

logger = logging.getLogger(__name__)

# Native kernels round differently from the same kernel on other shapes: what counts as equal, in standard deviations,
# and how far below a result without boundaries it must stay.
_EQUAL = {torch.float32: 1e-3, torch.float64: 1e-6}
_EQUAL_HALF = 5e-2
_SEPARATION = 30.0
# What modules may call the boundaries: as TRL does, and as flash-linear-attention's functions do besides.
_OFFERS = (FLASH_KEYS, (*FLASH_KEYS, "cu_seqlens"))


class LayerOverride(Override):
    """Sets the context's layout while a decoder layer runs, also when a backward pass recomputes a checkpointed one.

    Compiled graphs cannot set a context variable; around them the backbone's call has set it. A checkpointed layer
    that no graph can hold runs eagerly, and is recomputed eagerly.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward."""
        layer = self.module
        checkpointed: Any = getattr(layer, "gradient_checkpointing", False) and layer.training
        if torch.compiler.is_compiling() and not checkpointed:
            return self.call_original(*args, **kwargs)  # the backbone has set it, outside of the graph
        layout = find_layout(args, kwargs)
        # As a rule: the backbone's call has set it, and layers nest.
        if not checkpointed and layout is current_layout():
            return self.call_original(*args, **kwargs)
        if layout is None or not checkpointed:
            with packed_call(layout):
                return self.call_original(*args, **kwargs)
        # transformers would recompute the class's own forward, out of our sight.
        # Keywords ride in the partial: reentrant checkpoints take positional arguments only, and gradients flow
        # through these.
        return layer._gradient_checkpointing_func(partial(self._run, layout, kwargs), *args)  # type: ignore[operator]

    def _run(self, layout: PackedLayout, kwargs: dict[str, Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._uncheckpointed(*args, **kwargs)
        with packed_call(layout):
            return self._uncheckpointed(*args, **kwargs)

    def _uncheckpointed(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.module
        forward: Any = type(layer).forward
        # `GradientCheckpointingLayer` wraps the forward of each layer class; `__wrapped__` is the layer's own. FSDP2's
        # classes are wrapped twice: the inner wrapper does not checkpoint, as it is not the outermost.
        code = getattr(forward, "__code__", None)
        if self.original is None and code is not None and code.co_name == "forward_with_checkpointing":
            return forward.__wrapped__(layer, *args, **kwargs)  # the switch below is seen by other threads
        layer.gradient_checkpointing = False
        try:
            return self.call_original(*args, **kwargs)
        finally:
            layer.gradient_checkpointing = True


class MixerOverride(Override):
    """A module that mixes tokens: on its own kernels where they provably honour boundaries, else by document."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any] | None,
        *,
        native: dict[tuple[type, bool], tuple[str, ...]],
        masked: bool,
        beside: bool,
        window: int | None,
    ) -> None:
        super().__init__(module, original)
        self.native, self.masked, self.beside, self.window = native, masked, beside, window
        parameters = inspect.signature(type(module).forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        self.takes_shape = "input_ids_shape" in names  # a table of positions that is told them, or a shape
        known = [tuple(name for name in offer if takes_any or name in names) for offer in _OFFERS]
        self.offers = [offer for offer in dict.fromkeys(known) if offer]

    # Documents of other lengths in every batch.
    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        layout = find_layout(args, kwargs)
        if layout is None:
            return self.call_original(*args, **kwargs)
        # One document a row: there is nothing to keep apart.
        if layout.num_documents == layout.rows and not self.masked:
            args, kwargs = _without_mask(args, kwargs)
            return self.call_original(*args, **kwargs)
        if self.beside and self.takes_shape:
            return self.call_original(*args, **{**kwargs, "position_ids": layout.position_ids()})
        if self.beside and "position_ids" in kwargs:
            kwargs["position_ids"] = None  # natural positions may start elsewhere than at 0
        if not self.masked:
            args, kwargs = _without_mask(args, kwargs)
        # Inside, documents are separate or the kernels are told: what looks for a layout there must find none.
        with packed_call(None):
            offer = () if self.masked else self._native_offer(args, kwargs, layout)
            if offer:
                return self._run_native(args, kwargs, layout, offer)
            return run_by_document(self.call_original, args, kwargs, layout, sliding_window=self.window)

    def _run_native(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout, offer: tuple[str, ...]
    ) -> Any:
        """The module's own forward on the packed row, handed the boundaries of these names."""
        plain, named = _without_mask(args, kwargs)
        named = {name: value for name, value in named.items() if name not in BOUNDARIES}
        boundaries = {**layout.flash_kwargs(), "cu_seqlens": layout.cu_seqlens}
        return self.call_original(*plain, **named, **{name: boundaries[name] for name in offer})

    def _native_offer(self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout) -> tuple[str, ...]:
        """Names of the boundaries that this class of modules provably honours; found out once for
        each mode, on its first packed call that can tell. Kernels want one row, so several are never left to them."""
        kind = type(self.module), self.module.training  # in training mode some run another kernel
        if layout.rows > 1 or not self.offers:
            return ()
        if kind not in self.native:
            found = self._proven_offer(args, kwargs, layout)
            if found is None:
                return ()
            self.native[kind] = found
            how = "on its own kernels" if found else "document by document"
            mode = "training" if self.module.training else "evaluation"
            logger.info("trl-packfa: %s runs %s in %s.", kind[0].__name__, how, mode)
        return self.native[kind]

    @torch.no_grad()
    def _proven_offer(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout
    ) -> tuple[str, ...] | None:
        """Own kernels against document by document on this call: the first offer of boundaries that makes them equal,
        none if no offer does, `None` if this call could not tell."""
        # A trial must not move the random numbers that the training draws after it.
        with random_states_kept(devices_of(self.module)):
            exact = _first(run_by_document(self.call_original, args, dict(kwargs), layout)).float()
            error_of = partial(self._native_error, args, kwargs, layout, exact)
            # Without boundaries the kernels must be visibly wrong, else equal results would prove nothing about this
            # offer: a row of one long and some tiny documents, say, or a mixer whose gate is still shut.
            control = error_of(())
            if not control > _SEPARATION * 1e-6:
                return None
            dtype = next((a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), torch.float32)
            allowed = min(_EQUAL.get(dtype, _EQUAL_HALF), control / _SEPARATION)
            return next((offer for offer in self.offers if error_of(offer) <= allowed), ())

    def _native_error(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: PackedLayout,
        exact: torch.Tensor,
        offer: tuple[str, ...],
    ) -> float:
        """Largest difference of own kernels from `exact`, in its standard deviations; infinite where they refuse."""
        try:
            native = _first(self._run_native(args, kwargs, layout, offer)).float()
        except (ValueError, TypeError, RuntimeError, AttributeError, ImportError) as error:
            # transformers' guards, where kernels are missing
            logger.debug("trl-packfa: %s with %s: %s", type(self.module).__name__, offer, error)
            return float("inf")
        # NaN (no spread, or numbers that are not finite) compares as false with every limit: no proof.
        return float((native - exact).abs().max() / exact.std())


class FunctionOverride:
    """An attention module's own function of query, key, value and mask, on packed tokens where a call is packed.

    The older architectures' form of an attention interface: `(query (B, N, L, H), key, value, mask)` to
    `(output (B, N, L, H), weights)`.
    """

    def __init__(
        self, module: nn.Module, name: str, arguments: Callable[[Any], AttentionArguments], backends: BackendChoice
    ) -> None:
        self.module, self.name, self.read_arguments, self.backends = module, name, arguments, backends

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's attention function."""
        layout = find_layout(args, kwargs)
        if layout is None:
            return getattr(type(self.module), self.name)(self.module, query, key, value, *args, **kwargs)
        arguments = self.read_arguments(self.module)
        if not self.module.training:
            arguments = replace(arguments, dropout=0.0)
        q_TNH, k_TKH, v_TKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        # These modules may rotate query and key in float32; backends take one dtype.
        q_TNH, k_TKH = q_TNH.to(v_TKH.dtype), k_TKH.to(v_TKH.dtype)
        out_TNH = self.backends.attend(q_TNH, k_TKH, v_TKH, layout, arguments)
        return out_TNH.view(query.shape[0], query.shape[2], *out_TNH.shape[1:]).transpose(1, 2), None


def _without_mask(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module that knows masks of padding only, of which there is none."""
    plain = tuple(None if is_empty_mask(value) else value for value in args)
    return plain, {name: None if is_empty_mask(value) else value for name, value in kwargs.items()}


def _first(output: Any) -> torch.Tensor:
    """The tensor of a module's output."""
    return output if isinstance(output, torch.Tensor) else next(iter(output))
