"""The measurements, in an order that needs the fewest passes and holds one gradient per parameter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..collator import DataCollatorForPacking
from ..errors import UnsupportedModel
from ..finding import model_config, model_type
from ..graphs import runs_compiled
from ..patching import PatchState, find_state
from ..versions import MINIMUM_VERSIONS, installed_version
from ..zero3 import GradientParts, gradients_taken, is_partitioned, whole_size
from .probe import Collator, Probe, device_of
from .quiet import quiet
from .report import ExactnessReport

# Documents that bite: one token, unequal, a long one in the middle, one at either end.
_LENGTHS = (11, 1, 37, 5, 19)
_CHANGED = 2
# Sliding windows up to this many tokens are outgrown by the longest document.
_LONGEST = 512
# Rounding differs between shapes. Measured over 189 architectures in float32, exact ones stay below 3e-5 of the
# logits' standard deviation and contaminated ones above 7e-2; gradients below 1.1e-5 and above 4e-2. Between floor
# and ceiling the noise measured here decides; above the ceiling it is no rounding: padding changes what is computed.
_BOUNDS = {torch.float32: (1e-4, 1e-3), torch.float64: (1e-4, 1e-3)}
_BOUNDS_HALF = (1e-1, 2.5e-1)
_GRADIENT_BOUNDS = {torch.float32: (3e-4, 1e-2), torch.float64: (3e-4, 1e-2)}
_GRADIENT_BOUNDS_HALF = (1e-1, 5e-1)
# Experts in half precision: one rerouted token of the few here is a tenth of the gradient, a leak about all of it.
_GRADIENT_BOUNDS_ROUTED = (3e-1, 5e-1)
_NOISE_FACTOR = 4.0
# Parameters with next to no gradient are measured against this share of the mean one.
_SMALL = 1e-2


def check(model: nn.Module, *, collator: Collator | None = None, seed: int = 0) -> ExactnessReport:
    """Measure whether packing is exact on this model, as it is now: backend, dtype, quantization, adapter.

    The model must be patched. Runs a handful of small forwards and backwards; modes, gradients, caches and random
    state are left as they were. Run it under the autocast that training will use.

    Args:
        model (`torch.nn.Module`):
            A patched causal LM, bare or wrapped; under DeepSpeed ZeRO-3 its engine, between two steps.
        collator (`Callable`, *optional*):
            What makes the batches of the training, [`DataCollatorForPacking`] by default.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random tokens.

    Raises:
        [`UnsupportedModel`]: if the model is not patched, or in parts without ZeRO-3's engine.
    """
    state = find_state(model)
    if state is None:
        raise UnsupportedModel("the model is not patched.", do="Call trl_packfa.patch(model) first.")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # the same on every rank; gradients need not be shared here
    started = time.perf_counter()
    with gradients_taken(model) as parts, quiet(model, checkpointing=True), torch.enable_grad():
        probe = Probe(model, collator or DataCollatorForPacking(), _bite(state), _CHANGED, seed)
        measured = _Measurement(probe, parts).run()
    return ExactnessReport(
        model_type=model_type(model),
        rung=state.patch.rung,
        backend=", ".join(sorted(set(state.backends.resolved.values()))) or "the model's own attention",
        training=_training(model),
        changed=_CHANGED,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        versions={package: installed_version(package) or "" for package in ("trl-packfa", *MINIMUM_VERSIONS)},
        **measured,
    )


def _bite(state: PatchState) -> tuple[int, ...]:
    """Lengths whose longest document outgrows every window that can be outgrown cheaply."""
    outgrown = [window + 3 for window in state.windows if window and window < _LONGEST]
    return tuple(max([length, *outgrown]) if i == _CHANGED else length for i, length in enumerate(_LENGTHS))


class _Measurement:
    """The numbers of one report."""

    def __init__(self, probe: Probe, parts: GradientParts | None) -> None:
        self.probe, self.parts = probe, parts
        self.trained = [p for p in probe.model.parameters() if p.requires_grad]

    def run(self) -> dict[str, Any]:
        """Every measured field of the report."""
        probe, everything = self.probe, range(len(self.probe.lengths))
        # With gradients, as what it is compared to: kernels may be others without.
        changed = [logits.detach() for logits in probe.packed(probe.changed)]
        with torch.no_grad():
            control = _largest(*(_others(probe.packed(t, boundaries=False)) for t in (probe.tokens, probe.changed)))
            two_rows = probe.two_rows()
        input_gradients = self._input_gradients()
        # padded - alone is the noise; adding packed - padded to it makes packed - alone.
        self._clear()
        padded = self._backward(probe.padded(), everything)
        norms = self._norms()
        alone = [self._backward([probe.alone(i)], [i], sign=-1.0)[0] for i in everything]
        difference, relative, dtype = self._rules(alone)
        gradient_noise = relative(self._norms(), norms)
        packed = self._backward(probe.packed(probe.tokens), everything)
        self._backward(probe.padded(), everything, sign=-1.0)
        gradients = relative(self._norms(), norms)
        scale = float(torch.cat(alone).float().std())
        noise, parity = difference(alone, padded) / scale, difference(packed, alone) / scale
        isolation = difference(_others(packed), _others(changed)) / scale
        threshold = _within(noise, _BOUNDS.get(dtype, _BOUNDS_HALF))
        half = _GRADIENT_BOUNDS_ROUTED if relative is _relative_of_all else _GRADIENT_BOUNDS_HALF
        measured = {
            "lengths": probe.lengths,
            "dtype": str(dtype).removeprefix("torch."),
            "isolation": isolation,
            "input_gradients": input_gradients,
            "parity": max(parity, difference(two_rows, alone) / scale),
            "gradients": gradients,
            "noise": noise,
            "gradient_noise": gradient_noise,
            "loss": abs(probe.loss(packed) - probe.loss_alone(alone)),
            "control": control / scale,
            "threshold": threshold,
            "gradient_threshold": None
            if gradient_noise is None
            else _within(gradient_noise, _GRADIENT_BOUNDS.get(dtype, half)),
            "first_leak": self._first_leak() if self._anywhere(isolation > 0) else None,
        }
        if self._anywhere(not measured["parity"] <= threshold):
            measured["first_difference"] = self._first_difference(threshold)
        return measured

    def _rules(
        self, alone: list[torch.Tensor]
    ) -> tuple[Callable[..., float], Callable[..., float | None], torch.dtype]:
        """How logits and gradients are compared: token by token, unless experts in half precision reroute some."""
        dtype = _compute_dtype(self.probe.model, alone[0].dtype)
        routed_in_half = dtype not in _BOUNDS and _has_experts(self.probe.model)
        return (_typical, _relative_of_all, dtype) if routed_in_half else (_largest, _worst_relative, dtype)

    def _backward(
        self, logits: list[torch.Tensor], documents: Sequence[int], *, sign: float = 1.0
    ) -> list[torch.Tensor]:
        if self.trained and any(t.requires_grad for t in logits):
            self.probe.backward(logits, documents, sign=sign)
        return [t.detach() for t in logits]

    def _anywhere(self, found: bool) -> bool:
        """Whether it is so on any rank that holds a part of this model: they run its forwards together."""
        model = self.probe.model
        if not is_partitioned(model) and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return found
        everywhere: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everywhere, found)
        return any(everywhere)

    def _clear(self) -> None:
        if self.parts is not None:
            self.parts.clear()
        for parameter in self.trained:
            parameter.grad = None

    def _norms(self) -> list[float]:
        """L2 norm of each trained parameter's gradient."""
        if self.parts is not None:
            return self.parts.norms()
        norms = [None if p.grad is None else p.grad.float().norm() for p in self.trained]
        return [0.0 if n is None else float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms]

    def _input_gradients(self) -> float | None:
        before = self.probe.embedding_gradients(self.probe.tokens)
        if before is None:
            return None
        after = self.probe.embedding_gradients(self.probe.changed)
        return (
            None
            if after is None
            else _largest(_others(before), _others(after)) / float(torch.cat(before).float().std())
        )

    @torch.no_grad()
    def _first_leak(self) -> str | None:
        """Name of the first module whose output for another document moves when one document is replaced."""
        before, after = self.probe.outputs_packed(self.probe.tokens), self.probe.outputs_packed(self.probe.changed)
        moved = (
            name for name in before if name in after and _largest(_others(before[name]), _others(after[name])) > 0
        )
        return next(moved, None)

    @torch.no_grad()
    def _first_difference(self, threshold: float) -> str | None:
        """Name of the first module whose packed output for a document is not that of the document alone."""
        packed = self.probe.outputs_packed(self.probe.tokens)
        alone = [self.probe.outputs_alone(i) for i in range(len(self.probe.lengths))]
        for name, outputs in packed.items():
            own = [document[name] for document in alone if name in document]
            same = len(own) == len(outputs) and all(a.shape == b.shape for a, b in zip(own, outputs, strict=True))
            if same and _largest(own, outputs) > threshold * float(torch.cat(own).float().std()):
                return name
        return None


def _within(noise: float, bounds: tuple[float, float]) -> float:
    floor, ceiling = bounds
    return min(max(_NOISE_FACTOR * noise, floor), ceiling)


def _others(documents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All documents but the one that was replaced."""
    return [document for i, document in enumerate(documents) if i != _CHANGED]


def _largest(left: Any, right: Any) -> float:
    """Largest absolute difference over pairs of tensors; infinite if either is not finite."""
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(left, right, strict=True))
    return worst if worst == worst else float("inf")


def _typical(left: Any, right: Any) -> float:
    """Largest median over the documents: of each document's tokens, how far the middle one is off.

    For experts in half precision: rounding sends single tokens to another expert, alone in another batch just as
    packed, and such a token is off by whole units. A wrong boundary or position is off for most of a document.
    """
    medians = [float((a.float() - b.float()).abs().amax(dim=-1).median()) for a, b in zip(left, right, strict=True)]
    worst = max(median for median, document in zip(medians, left, strict=True) if len(document) > 1)
    return worst if worst == worst else float("inf")


def _worst_relative(differences: list[float], norms: list[float]) -> float | None:
    """Worst difference of a parameter's gradient relative to the gradient; `None` if nothing trains."""
    total = sum(norm**2 for norm in norms) ** 0.5
    if not total:
        return None
    small = _SMALL * total / len(norms) ** 0.5
    worst = max(d / max(norm, small) for d, norm in zip(differences, norms, strict=True))
    return worst if worst == worst else float("inf")


def _relative_of_all(differences: list[float], norms: list[float]) -> float | None:
    """Difference of the whole gradient relative to it; `None` if nothing trains."""
    total = sum(norm**2 for norm in norms) ** 0.5
    return sum(d**2 for d in differences) ** 0.5 / total if total else None


def _compute_dtype(model: nn.Module, logits: torch.dtype) -> torch.dtype:
    """The dtype whose rounding shows: that of most weights, or autocast's, where the logits are cast up from it."""
    if logits in _BOUNDS and torch.is_autocast_enabled(device_of(model).type):
        return torch.get_autocast_dtype(device_of(model).type)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += whole_size(parameter) if parameter.is_floating_point() else 0
    return sizes.most_common(1)[0][0] if logits in _BOUNDS else logits


def _has_experts(model: nn.Module) -> bool:
    config = model_config(model).get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _training(model: nn.Module) -> str:
    """What trains and how, in words."""
    trained = sum(whole_size(p) for p in model.parameters() if p.requires_grad)
    every = sum(map(whole_size, model.parameters()))
    adapters = sorted({config.peft_type.value for config in getattr(model, "peft_config", {}).values()})
    parts = [*adapters, "all parameters train" if trained == every else f"{trained} parameters train"]
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        parts.append("quantized")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        parts.append("gradient checkpointing")
    if runs_compiled(model):
        parts.append("compiled")
    return ", ".join(parts)
