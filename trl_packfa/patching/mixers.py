"""The `forward`s of modules that mix tokens beside or instead of attention: state, convolutions, positions, indexers.

Each runs document by document, unless a trial has shown that its own kernels honour the boundaries in the call.

Shape letters: B rows, L row length, T packed tokens (B * L), N heads, H head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..comparison import TOLERANCES, Comparison
from ..compile import outside_of_graphs
from ..kernels.lora import lora_overrides
from ..kernels.norms import RMSNormOverride, has_norm_kernel
from ..kernels.random_states import devices_of, restoring_random_states
from ..layout import PackedLayout
from ..layout.call_context import (
    BOUNDARIES,
    FLASH_KEYS,
    PackedCall,
    current_call,
    find_call,
    find_layout,
    in_call,
    is_empty_mask,
    packed_call,
)
from ..override import NamedOverride, Override
from ..patches.base import DocumentPatch, FunctionPatch, GroupsPatch, ModulePatch, Patch
from .cross_attention import CrossAttentionOverride, cross_attention_of
from .inspect import class_names
from .per_document import run_by_document
from .rotary import RotaryOverride, depends_on_length
from .state import PatchState

logger = logging.getLogger(__name__)

# Results of a module's own kernels must also differ so many times less than a result without boundaries does.
_SEPARATION = 30.0
# Argument names for the boundaries: TRL's, and TRL's with that of flash-linear-attention's functions.
_OFFERS = (FLASH_KEYS, (*FLASH_KEYS, "cu_seqlens"))


def inner_overrides(state: PatchState) -> list[Override]:
    """Make the overrides of modules inside the backbone, other than attention."""
    backbone, mixers = state.parts.backbone, state.parts.mixers
    if isinstance(state.patch, (DocumentPatch, GroupsPatch)):
        return []
    rotary = [module for module in backbone.modules() if depends_on_length(module)]
    overrides: list[Override] = [RotaryOverride(module) for module in rotary]
    overrides += [MixerOverride(module, state.patch, state.native) for module in mixers.values()]
    overrides += [CrossAttentionOverride(module) for module in cross_attention_of(backbone)]
    fused = state.options.fused_kernels
    when_packed = lora_overrides(backbone, fused=fused, invocations=state.invocations)
    if fused:
        when_packed += [RMSNormOverride(module) for module in backbone.modules() if has_norm_kernel(module)]
    # These modules get neither the keyword nor the mask, so they read the context variable. With activation
    # checkpointing the backward pass recomputes a layer outside of the backbone's call: the layer sets the variable.
    if mixers or isinstance(state.patch, FunctionPatch) or state.patch.makes_mask or when_packed:
        layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
        overrides += [LayerOverride(layer) for layer in layers]
    return overrides + when_packed


class LayerOverride(Override):
    """Forward of a decoder layer that sets the thread's call, also when a backward pass recomputes a checkpointed
    layer.

    Compiled graphs cannot set a context variable; the backbone's call has set it around them. A checkpointed layer
    that cannot be compiled runs eagerly, and is recomputed eagerly.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward."""
        layer = self.module
        checkpointed: Any = getattr(layer, "gradient_checkpointing", False) and layer.training
        if torch.compiler.is_compiling() and not checkpointed:
            return self.call_original(*args, **kwargs)  # the backbone has set it, outside of the graph
        call = find_call(args, kwargs)
        # The usual case: the backbone's call, or a layer around this one, has set it.
        if not checkpointed and call.layout is current_call().layout:
            return self.call_original(*args, **kwargs)
        if call.layout is None or not checkpointed:
            with in_call(call):
                return self.call_original(*args, **kwargs)
        # transformers would recompute the class's own forward, which does not set the layout. The partial holds the
        # keywords: reentrant checkpoints take positional arguments only, and gradients flow through these.
        return layer._gradient_checkpointing_func(partial(self._run, call, kwargs), *args)  # type: ignore[operator]

    def _run(self, call: PackedCall, kwargs: dict[str, Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._uncheckpointed(*args, **kwargs)
        with in_call(call):
            return self._uncheckpointed(*args, **kwargs)

    def _uncheckpointed(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.module
        forward: Any = type(layer).forward
        # `GradientCheckpointingLayer` wraps the forward of each layer class; `__wrapped__` is the layer's own. FSDP2's
        # classes are wrapped twice: the inner wrapper does not checkpoint, as it is not the outermost.
        code = getattr(forward, "__code__", None)
        if self.original is None and code is not None and code.co_name == "forward_with_checkpointing":
            return forward.__wrapped__(layer, *args, **kwargs)  # preferred, as other threads see the switch below
        layer.gradient_checkpointing = False
        try:
            return self.call_original(*args, **kwargs)
        finally:
            layer.gradient_checkpointing = True


class MixerOverride(NamedOverride):
    """Forward of a module that mixes tokens: by own kernels if they provably honour boundaries, else by document."""

    def __init__(self, module: nn.Module, patch: Patch, native: dict[tuple[type, bool], tuple[str, ...]]) -> None:
        super().__init__(module)
        classes, config = set(class_names(module)), getattr(module, "config", None)
        self.native, self.beside = native, not classes.isdisjoint(patch.beside)
        masked = patch.masked_mixers if isinstance(patch, ModulePatch) else ()
        self.masked = self.beside or not classes.isdisjoint(masked)
        # RecurrentGemma's attention has no `sliding_window`: the window is its config's `attention_window_size`.
        self.window: Any = getattr(module, "sliding_window", None) or getattr(config, "attention_window_size", None)
        self.takes_shape = "input_ids_shape" in self.names  # a table of positions that takes position ids or a shape
        known = [tuple(name for name in offer if self.takes_any or name in self.names) for offer in _OFFERS]
        self.offers = [offer for offer in dict.fromkeys(known) if offer]

    # Outside of graphs, as every batch has documents of other lengths.
    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        layout = find_layout(args, kwargs)
        if layout is None:
            return self.call_original(*args, **kwargs)
        if not self.masked:
            # The packed call's empty mask: such a module knows masks of padding only.
            args = tuple(None if is_empty_mask(value) else value for value in args)
            kwargs = {name: None if is_empty_mask(value) else value for name, value in kwargs.items()}
            if layout.num_documents == layout.rows:  # there is nothing to keep separate
                return self.call_original(*args, **kwargs)
        elif self.beside and self.takes_shape:
            return self.call_original(*args, **{**kwargs, "position_ids": layout.position_ids()})
        elif self.beside and "position_ids" in kwargs:
            kwargs["position_ids"] = None  # the model's own positions may not begin at 0
        # Inside, documents are separate or the kernels know the boundaries: modules there must find no layout.
        with packed_call(None):
            offer = () if self.masked else self._native_offer(args, kwargs, layout)
            if offer:
                return self._run_native(args, kwargs, layout, offer)
            return run_by_document(self.call_original, args, kwargs, layout, sliding_window=self.window)

    def _run_native(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout, offer: tuple[str, ...]
    ) -> Any:
        """Run the module's own forward on the packed row, with the boundaries under these names."""
        named = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        boundaries = {**layout.flash_kwargs(), "cu_seqlens": layout.cu_seqlens}
        return self.call_original(*args, **named, **{name: boundaries[name] for name in offer})

    def _native_offer(self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout) -> tuple[str, ...]:
        """Return the names of the boundaries that this class of modules provably honours in its mode."""
        kind = type(self.module), self.module.training  # in training mode some run another kernel
        if layout.rows > 1 or not self.offers:  # kernels need a single row
            return ()
        if kind not in self.native:
            found = self._exact_offer(args, kwargs, layout)
            if found is None:  # a later call may show it
                return ()
            self.native[kind] = found
            how = "on its own kernels" if found else "document by document"
            mode = "training" if self.module.training else "evaluation"
            logger.info("trl-packfa: %s runs %s in %s.", kind[0].__name__, how, mode)
        return self.native[kind]

    @torch.no_grad()
    def _exact_offer(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: PackedLayout
    ) -> tuple[str, ...] | None:
        """Return the first names of boundaries with which the module's own kernels equal document by document.

        Return `()` if none does, `None` if this call cannot show it.
        """
        # A trial must not change the random numbers that training draws after it.
        with restoring_random_states(devices_of(self.module)):
            exact = _first(run_by_document(self.call_original, args, dict(kwargs), layout)).float()

            def error_of(offer: tuple[str, ...]) -> float:
                """Return the largest difference of the own kernels in standard deviations; `inf` if they fail."""
                try:
                    native = _first(self._run_native(args, kwargs, layout, offer)).float()
                except (ValueError, TypeError, RuntimeError, AttributeError, ImportError) as error:
                    # transformers raises these if kernels are missing
                    logger.debug("trl-packfa: %s with %s: %s", type(self.module).__name__, offer, error)
                    return float("inf")
                # NaN (no spread, or numbers that are not finite) compares as false with every limit: it shows nothing.
                return float((native - exact).abs().max() / exact.std())

            # Without boundaries the kernels must be visibly wrong, or equal results would show nothing. They may not
            # be in a row of one long and some tiny documents, or in a mixer whose gate is still shut.
            control = Comparison("control", error_of(()), _SEPARATION * 1e-6)
            if not control.holds:
                return None
            dtypes = (value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            least = TOLERANCES[next((dtype for dtype in dtypes if dtype in TOLERANCES), torch.float32)].kernels
            allowed = min(least, control.difference / _SEPARATION)
            return next((offer for offer in self.offers if Comparison("parity", error_of(offer), allowed).holds), ())


def _first(output: Any) -> torch.Tensor:
    """Return the tensor of a module's output, the first item of a tuple."""
    return output if isinstance(output, torch.Tensor) else next(iter(output))
