"""Cached decisions on which LoRA layers can be fused.

A decision is valid while the objects that it depends on do not change. PEFT's properties and module lookups are slow,
so each call compares these objects instead. Adapters may still be switched, merged, disabled, hooked or replaced under
the patch.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...override import runs_own_forward
from .projections import Projection, is_adapted, read, unsupported_reason

# Attributes that `unsupported_reason` and `read` use: of a LoRA layer, and of bitsandbytes' quantization state.
_STATES = ("_active_adapter", "_disable_adapters", "merged_adapters", "cast_input_dtype_enabled", "lora_variant",
           "scaling")  # fmt: skip
_QUANTIZED = ("packing_format_for_cpu", "shape")


def decide(module: nn.Module) -> Projection | None:
    """Return the projection of a layer if it can be fused now, else `None`."""
    decision = _DECISIONS.get(module)
    if decision is not None and decision.stands(module):
        return decision.projection
    _DECISIONS.pop(module, None)
    if unsupported_reason(module) is not None:
        return None
    decision = _DECISIONS[module] = Decision(module)
    return decision.projection


class Decision:
    """The decision that a layer can be fused, with its projection and the objects that the decision depends on.

    [`unsupported_reason`] must be `None` for the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self.projection = read(module)
        # Entries (namespace, name, object that the name must refer to); the object is `None` if the name is missing.
        self._same: list[tuple[Any, str, Any]] = []
        # Modules inside the layer that it calls, each with its class.
        self._called: list[tuple[nn.Module, type]] = []
        self._class, self._active, self._active_then, self._merged = type(module), None, None, ()
        base: Any = module
        if is_adapted(module):
            base = module.base_layer
            self._watch_adapter(module)
            self._called.append((base, type(base)))
        self._watch(vars(base), "compute_dtype")
        self._watch_parameters(base)
        state = getattr(base.weight, "quant_state", None)
        if state is not None:
            self._watch(vars(base.weight), "quant_state")
            self._watch(vars(state), *_QUANTIZED)
        self._frozen = [base.weight] if base.bias is None else [base.weight, base.bias]
        for cls in {self._class, *(cls for _, cls in self._called)}:
            self._watch(vars(cls), "forward")
        # The layer's own dict is not stored: its `forward` refers to the layer, so keeping the dict would keep the
        # layer alive.
        self._own = [(name, value) for namespace, name, value in self._same if namespace is vars(module)]
        self._same = [watched for watched in self._same if watched[0] is not vars(module)]
        weights = (self.projection.weight, self.projection.lora_A, self.projection.lora_B)
        self._dtypes = [(weight, weight.dtype) for weight in weights if weight is not None]

    def stands(self, module: nn.Module) -> bool:
        """Tell whether all of these objects are unchanged."""
        own = vars(module)
        # Loops instead of `all(...)`, because this runs for each layer and call, and a generator doubles the cost.
        for name, value in self._own:
            if own.get(name) is not value:
                return False
        for namespace, name, value in self._same:
            if namespace.get(name) is not value:
                return False
        for called, cls in self._called:
            if type(called) is not cls or not runs_own_forward(called):
                return False
        for weight, dtype in self._dtypes:
            if weight.dtype is not dtype:
                return False
        for weight in self._frozen:
            if weight.requires_grad:
                return False
        unchanged = type(module) is self._class and not self._merged and self._active == self._active_then
        return unchanged and runs_own_forward(module)

    def _watch_adapter(self, module: Any) -> None:
        name = next(name for name in module.active_adapters if name in module.lora_A)
        self._watch(vars(module), *_STATES)
        self._active, self._merged = module.active_adapter, module.merged_adapters
        self._active_then = self._active if isinstance(self._active, str) else list(self._active)
        self._watch(module._modules, "base_layer", "lora_A", "lora_B", "lora_dropout")
        self._watch(module.lora_A._modules, *module.active_adapters)
        self._watch(module.lora_variant, name)
        self._watch(module.scaling, name)
        for container in (module.lora_A, module.lora_B, module.lora_dropout):
            self._watch(container._modules, name)
            self._called.append((container[name], type(container[name])))
        for factor in (module.lora_A[name], module.lora_B[name]):
            self._watch_parameters(factor)
        self._watch(vars(module.lora_dropout[name]), "p", "training")

    def _watch_parameters(self, layer: Any) -> None:
        self._watch(layer._parameters, "weight", "bias")
        self._watch(vars(layer.weight), "ds_shape")  # DeepSpeed ZeRO-3 splits a weight in place

    def _watch(self, namespace: Any, *names: str) -> None:
        self._same += [(namespace, name, namespace.get(name)) for name in names]


_DECISIONS: WeakKeyDictionary[nn.Module, Decision] = WeakKeyDictionary()
