"""Forwards that fuse LoRA layers: one linear layer, projections of one input, gated MLPs.

Only packed calls are fused. Other calls, and layers with an [`unsupported_reason`], run PEFT's own forward.

Shape letters: B rows, L row length, D input features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers.models.llama.modeling_llama import LlamaMLP

from ...layout.call_context import current_call
from ...override import Override, computes_as, forward_slot, has_library_forward, override_in, runs_own_forward
from ..liger import gated_by_liger, is_swiglu_on_cuda, multiplies_by_liger
from ..norms import source_of
from .activated import ActivatedLoraOverride, Invocations, activated_layers
from .decisions import decide
from .in_graphs import project_in_graph
from .products import ProjectTogether, gated_mlp
from .projections import Projection, compute_dtype, factors_of, is_adapted, output_dtype, read, unsupported_reason

_GATED = ("gate_proj", "up_proj", "down_proj")
# Hooks that torch calls for every module.
_HOOKS_OF_EVERY_MODULE = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_backward_hooks,
    torch_modules._global_backward_pre_hooks,
)


class AdaptedLinearOverride(ActivatedLoraOverride):
    """A LoRA layer that computes base and update together."""

    def call_plain(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward."""
        outputs = None if args or kwargs else _project((self.module,), x)
        return self.call_original(x, *args, **kwargs) if outputs is None else outputs[0]


class GatedMLPOverride(Override):
    """A gated MLP, computed as one function if it has LoRA layers.

    Liger's kernels compute the activation and the product with it, if they can.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the MLP's forward."""
        mlp: Any = self.module
        if torch.compiler.is_compiling():
            # The compiler fuses the operators between the products, and computes them again in the backward.
            (gate, up), _ = project_together(x, mlp.gate_proj, mlp.up_proj)
            return mlp.down_proj(mlp.act_fn(gate) * up)
        projections = _readable([getattr(mlp, name) for name in _GATED])
        dtype = None if projections is None else compute_dtype(x, projections)
        by_liger = multiplies_by_liger(mlp, x)
        if projections is None or dtype is None or not _can_be_repeated(mlp.act_fn):
            return self._call_in_parts(x, by_liger)
        out = output_dtype(x, projections[0])
        if output_dtype(x, projections[2]) != out:
            return self._call_in_parts(x, by_liger)
        options = {"by_liger": by_liger, "dtype": dtype, "dtype_out": out}
        with torch.autocast(x.device.type, enabled=False):
            y = gated_mlp(x.flatten(0, -2), projections, mlp.act_fn, source_of(x), **options)
        return y.view(*x.shape[:-1], -1)

    def _call_in_parts(self, x: torch.Tensor, by_liger: bool) -> torch.Tensor:
        """Run the MLP layer by layer, as its own forward does."""
        packed = by_liger and current_call().layout is not None
        return gated_by_liger(self.module, x) if packed else self.call_original(x)


def project_together(x: torch.Tensor, *modules: nn.Module) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Compute the outputs of several layers for one input `(B, L, D)`, together if they are patched LoRA layers.

    Also return whether they were computed together. Then only the caller holds the outputs, and may overwrite them:
    layers with hooks are not fused, and the backward does not read outputs.
    """
    outputs = _project(modules, x) if any(map(_is_patched, modules)) else None
    return (tuple(module(x) for module in modules), False) if outputs is None else (outputs, True)


def adapted_layers(module: nn.Module) -> list[nn.Module]:
    """List the LoRA layers in a module."""
    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def lora_overrides(backbone: nn.Module, *, fused: bool, invocations: Invocations) -> list[Override]:
    """Make the overrides of a backbone's LoRA layers, and of the MLPs that contain some or that Liger computes.

    If not `fused`, only overrides for activated adapters are made, also for layers that may get one later.
    """
    # Graphs cannot see that a class has another forward, so it is tested here.
    layers = [
        module
        for module in backbone.modules()
        if is_adapted(module) and forward_slot(module) == "forward" and has_library_forward(module)
    ]
    found: list[Override] = []
    if fused:
        found += [AdaptedLinearOverride(layer, invocations) for layer in layers]
        # Many architectures have Llama's MLP.
        mlps = [module for module in backbone.modules() if computes_as(module, LlamaMLP.forward)]
        found += [GatedMLPOverride(mlp) for mlp in mlps if adapted_layers(mlp) or is_swiglu_on_cuda(mlp)]
    taken = {id(override.module) for override in found}
    others = {id(layer): layer for layer in (*layers, *activated_layers(backbone))}
    return found + [ActivatedLoraOverride(layer, invocations) for key, layer in others.items() if key not in taken]


def describe_lora(layers: Sequence[nn.Module], fused: bool) -> list[str]:
    """Describe the LoRA layers that are fused, and why others are not, one line for each case."""
    reasons = Counter(_reason(layer) if fused else "fused_kernels=False" for layer in layers)
    how = {why: f"PEFT's own forward ({why})" if why else "fused, in packed calls" for why in reasons}
    return [f"{n} x LoRA: {how[why]}" for why, n in reasons.items()]


def _reason(layer: nn.Module) -> str | None:
    return unsupported_reason(layer) or (None if _is_patched(layer) else "not in a packed part of the model")


def _is_patched(module: nn.Module) -> bool:
    return isinstance(override_in(module), AdaptedLinearOverride)


def _readable(modules: Sequence[nn.Module]) -> list[Projection] | None:
    """Return the projections of a packed call's layers if all can be fused and one has an adapter, else `None`."""
    if torch.compiler.is_compiling():
        return _readable_in_graph(modules)
    if current_call().layout is None or any(_HOOKS_OF_EVERY_MODULE):
        return None
    found: list[Projection] = []
    for module in modules:
        projection = decide(module)
        if projection is None:
            return None
        found.append(projection)
    return found if any(projection.lora_A is not None for projection in found) else None


def _readable_in_graph(modules: Sequence[nn.Module]) -> list[Projection] | None:
    """Return the projections of layers that a traced graph can fuse, else `None`.

    Every call of the graph is then fused, packed or not. torch guards the decision.
    """
    # A graph cannot read the context, so it does not know which calls are packed. Compiled results differ from PEFT's
    # in the last bits anyway.
    if not any(map(is_adapted, modules)) or any(unsupported_reason(module) for module in modules):
        return None
    found = [read(module) for module in modules]
    return None if any(p.quant_state is not None or p.draws for p in found) else found


def _project(modules: Sequence[nn.Module], x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    projections = _readable(modules)
    dtype = None if projections is None else compute_dtype(x, projections)
    if projections is None or dtype is None:
        return None
    if torch.compiler.is_compiling():
        parts = project_in_graph(x.flatten(0, -2), projections, dtype, output_dtype(x, projections[0]))
        return tuple(part.view(*x.shape[:-1], -1) for part in parts)
    outs = [output_dtype(x, projection) for projection in projections]
    with torch.autocast(x.device.type, enabled=False):
        options = (source_of(x), projections, dtype, outs)
        results = ProjectTogether.apply(x.flatten(0, -2), *options, *factors_of(projections))
    return tuple(result.view(*x.shape[:-1], -1) for result in results)


def _can_be_repeated(activation: nn.Module) -> bool:
    """Tell whether an activation can run in chunks and again: it has no parameters, hooks or other forward."""
    return next(activation.parameters(), None) is None and runs_own_forward(activation)
