"""Faster kernels for norms, rotary embeddings and gated MLPs: choose the modules that use them, and describe the
choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..kernels.cpu import RMSNormOverride, is_rms_norm_on_cpu
from ..kernels.liger import (
    LigerRMSNormOverride,
    SwiGLUOverride,
    is_rms_norm_on_cuda,
    is_swiglu_on_cuda,
    lies_on_cuda,
    liger_kernels,
    liger_unavailable,
    multiplies_by_liger,
)
from ..kernels.lora.overrides import GatedMLPOverride
from ..kernels.rotary import rotates
from ..runtime.override import Override, override_in
from .forwards import AttentionOverride


def kernel_overrides(backbone: nn.Module, *, taken: set[int]) -> list[Override]:
    """Return overrides of the norms and gated MLPs for whose device a faster kernel exists.

    `taken` holds the ids of modules that have an override already.
    """
    left = [module for module in backbone.modules() if id(module) not in taken]
    overrides: list[Override] = [RMSNormOverride(module) for module in left if is_rms_norm_on_cpu(module)]
    overrides += [LigerRMSNormOverride(module) for module in left if is_rms_norm_on_cuda(module)]
    return overrides + [SwiGLUOverride(module) for module in left if is_swiglu_on_cuda(module)]


def describe_kernels(state: Any) -> list[str]:
    """List which kernel runs each kind of module of a `PatchState`'s model, one line a kind.

    Modules that run the model's own code are not listed. If Liger cannot run on CUDA, a line gives the reason.
    """
    overrides = [override for module, slot, _ in state.edits if (override := override_in(module, slot)) is not None]
    if not state.options.fused_kernels:
        return ["norms, rotation and SwiGLU: the model's own code (fused_kernels=False)"]
    found: Counter[tuple[str, str]] = Counter(kind for override in overrides for kind in _kinds(override))
    lines = [f"{n} x {what}: {how}, in packed calls" for (what, how), n in found.items()]
    unavailable = liger_unavailable()
    on_cuda = any(lies_on_cuda(p) for override in overrides[:1] for p in override.module.parameters())
    if on_cuda and unavailable is not None:
        lines.append(f"norms, rotation and SwiGLU: the model's own code ({unavailable})")
    return lines


def _kinds(override: Override) -> Iterator[tuple[str, str]]:
    """Yield each kind of module that an override computes by a kernel, with the kernel's name."""
    kernels, weight = liger_kernels(), next(override.module.parameters(), None)
    by_liger = "" if kernels is None else f"liger-kernel {kernels.version}"
    on_cuda = kernels is not None and weight is not None and lies_on_cuda(weight)
    if isinstance(override, RMSNormOverride):
        yield "RMSNorm", "in pieces on a CPU"
    elif isinstance(override, LigerRMSNormOverride):
        yield "RMSNorm", by_liger
    elif isinstance(override, AttentionOverride) and on_cuda and rotates(override.qkv):
        yield "rotation", by_liger
    elif isinstance(override, SwiGLUOverride) or (
        isinstance(override, GatedMLPOverride)
        and override.by_liger
        and weight is not None
        and multiplies_by_liger(override.module, weight)
    ):
        yield "SwiGLU", by_liger
