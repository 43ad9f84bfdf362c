"""Describe what a patch did to a model, and which kernels compute its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ..kernels.liger import is_swiglu_on_cuda, lies_on_cuda, liger_kernels, liger_unavailable
from ..kernels.lora import describe_lora
from ..kernels.lora.overrides import GatedMLPOverride
from ..kernels.norms import RMSNormOverride
from ..kernels.rotary import rotates
from ..override import Override, override_in
from .attention_forwards import AttentionOverride
from .by_name import NAME, runs_by_name
from .inspect import model_type
from .state import PatchState, find_state


def describe(model: nn.Module) -> str:
    """Describe the patch of a model, one fact per line: level, modules, attention arguments and backends."""
    state = find_state(model)
    if state is None:
        return f"runs by name, attn_implementation='{NAME}'" if runs_by_name(model) else "not patched"
    windows = Counter(f"window {window}" if window else "full" for window in state.parts.windows)
    lines = [
        f"model type {model_type(model)} (patch from {state.patch.origin})",
        f"level: {state.patch.level}",
        "backbone: document boundaries are read once per call, no attention mask is built",
        f"backend asked for: {state.options.backend}",
    ]
    if state.unpadding is not None:
        lines.append(f"padded batches: computed without padding, {state.unpadding_report}")
        if (sharing := state.unpadding.sharing) is not None:
            why = f"not used, rows are computed separately: {sharing.refusal}"
            how = why if sharing.refusal else f"computed once, exact: {state.unpadding_report['sharing']}"
            lines.append(f"shared prefixes: {how}")
    if windows:
        modules = ", ".join(f"{n} x {window}" for window, n in windows.items())
        lines.insert(3, f"{len(state.parts.attention)} attention modules: {modules}")
    by_document = Counter(type(module).__name__ for module in state.parts.mixers.values())
    lines += [f"{n} x {name}: {_how_it_runs(name, state)}" for name, n in by_document.items()]
    lines += [f"backend used: {line}" for line in state.backends.describe()]
    lines += describe_lora(state.adapted, state.options.fused_kernels)
    return "\n".join([*lines, *_describe_kernels(state)])


def _how_it_runs(name: str, state: PatchState) -> str:
    """Describe how mixers of this class run in training and in evaluation, which are decided separately."""
    offers = {is_training: offer for (kind, is_training), offer in state.native.items() if kind.__name__ == name}
    native = [is_training for is_training, offer in offers.items() if offer]
    if not native:
        return "document by document"
    if len(native) == len(offers):
        return "on its own kernels"
    mode = "training" if native[0] else "evaluation"
    return f"on its own kernels in {mode}, otherwise document by document"


def _describe_kernels(state: PatchState) -> list[str]:
    """List which kernel runs each kind of module, where it is not the model's own code, and why Liger cannot run."""
    overrides = [override for module, slot, *_ in state.edits if (override := override_in(module, slot)) is not None]
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
        if on_cuda:
            yield "RMSNorm", by_liger
    elif isinstance(override, AttentionOverride) and on_cuda and rotates(override.qkv):
        yield "rotation", by_liger
    elif isinstance(override, GatedMLPOverride) and is_swiglu_on_cuda(override.module):
        yield "SwiGLU", by_liger
