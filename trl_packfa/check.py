"""The proof: on the user's own model, does any document see another, and is packing what training alone would be?

Three measurements on one small packed batch, each with its number, and a control that must fail: with the
boundaries removed the same measurements have to show a leak, otherwise they prove nothing.

Shape letters: T packed tokens, S documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .collator import DataCollatorForPacking
from .errors import ContaminationError, UnsupportedModel
from .layout import PackedLayout
from .patching import find_state, model_type

# Documents that bite: one token, unequal, a long one in the middle, one at either end.
_LENGTHS = (11, 1, 37, 5, 19)
_CHANGED = 2
# Sliding windows up to this many tokens are outgrown by the longest document.
_LONGEST = 512
# Rounding differs between shapes. Measured over 189 architectures in float32, exact ones stay below 3e-5 of the
# logits' standard deviation and contaminated ones above 7e-2. Between floor and ceiling the noise measured here
# decides; above the ceiling it is no rounding: padding changes what the model computes.
_PARITY_BOUNDS = {torch.float32: (1e-4, 1e-3), torch.float64: (1e-4, 1e-3)}
_PARITY_BOUNDS_HALF = (1e-1, 2.5e-1)
_NOISE_FACTOR = 4.0
# A leak is told from rounding (regrouped experts) by staying this many times below what the control shows.
_SEPARATION = 30.0
# The least that removing the boundaries must move, or the model mixes no tokens and nothing can be told.
_VISIBLE = 1e-4


@dataclass(frozen=True)
class ExactnessReport:
    """What the check measured, in standard deviations of the logits, and its verdict.

    Args:
        model_type (`str`), backend (`str`), dtype (`str`), lengths (`tuple[int, ...]`):
            What was checked.
        isolation (`float`):
            Largest change of any other document's logits when one document is replaced; 0 is exact to the bit.
        parity (`float`):
            Largest difference between a document packed and the same document alone; of a model with experts in half
            precision, the largest median over the documents' tokens, as rounding alone reroutes single tokens.
        noise (`float`):
            Largest difference between a document alone and the same document in a padded batch: rounding only.
        control (`float`):
            Isolation with the boundaries removed. A check that cannot see this has no power.
        first_leak (`str` or `None`):
            First module whose output moved for another document.
    """

    model_type: str
    backend: str
    dtype: str
    lengths: tuple[int, ...]
    isolation: float
    parity: float
    noise: float
    control: float
    threshold: float
    first_leak: str | None = None

    @property
    def is_isolated(self) -> bool:
        """No document saw another: nothing moved, or no more than rounding and far less than a leak."""
        return self.isolation <= min(_NOISE_FACTOR * self.noise, self.control / _SEPARATION)

    @property
    def has_power(self) -> bool:
        """Whether the control leaked where it had to."""
        return self.control > _VISIBLE

    @property
    def is_exact(self) -> bool:
        """Isolated, equal to alone, and shown by a test that could have failed."""
        return self.verdict == "exact"

    @property
    def verdict(self) -> str:
        """`exact`, `leak`, `differs` or `no power`."""
        if not self.has_power:
            return "no power" if self.isolation == 0 else "leak"
        if not self.is_isolated:
            return "leak"
        return "exact" if self.parity <= self.threshold else "differs"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the verdict included."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        return (
            f"{self.verdict}: isolation {self.isolation:.1e}, parity {self.parity:.1e} (allowed {self.threshold:.1e}, "
            f"rounding noise {self.noise:.1e}, without boundaries {self.control:.1e}) "
            f"[{self.model_type}, {self.backend}, {self.dtype}]"
        )

    def require_exact(self) -> None:
        """Raise unless the verdict is `exact`.

        Raises:
            [`ContaminationError`]: with the numbers and the first module that leaked.
        """
        if self.is_exact:
            return
        why = {
            "leak": f"replacing document {_CHANGED} changed other documents; first in module '{self.first_leak}'",
            "differs": "a document's logits differ from those of the same document alone",
            "no power": "removing the boundaries changed nothing: this model mixes no tokens, or its weights are zero",
        }[self.verdict]
        raise ContaminationError(
            f"packing is not exact on this model: {self}",
            why=[why],
            do="Try attention_backend='reference' to tell kernel from patch, train padded with packing=False, and "
            "please report it. check_packing=False trains without this proof.",
        )


def check(model: nn.Module, *, seed: int = 0) -> ExactnessReport:
    """Measure whether packing is exact on this model, as it is now: backend, dtype, quantization, adapter.

    The model must be patched. Runs a handful of small forwards without gradients; modes, caches and random state
    are left as they were. Run it under the autocast that training will use.

    Args:
        model (`torch.nn.Module`):
            A patched causal LM, bare or wrapped.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random tokens.

    Raises:
        [`UnsupportedModel`]: if the model is not patched.
    """
    state = find_state(model)
    if state is None:
        raise UnsupportedModel("the model is not patched.", do="Call trl_packfa.patch(model) first.")
    windows = [window or 0 for window in state.windows]
    with quiet(model):
        probe = _Probe(model, _bite(windows), seed)
        alone = probe.alone()
        scale = float(torch.cat(alone).float().std())
        packed, changed = probe.packed(probe.tokens), probe.packed(probe.changed)
        bare, bare_changed = (
            probe.packed(probe.tokens, boundaries=False),
            probe.packed(probe.changed, boundaries=False),
        )
        routed_in_half = packed[0].dtype not in _PARITY_BOUNDS and _has_experts(model)
        difference = _typical if routed_in_half else _largest
        noise = difference(alone, probe.padded()) / scale
        floor, ceiling = _PARITY_BOUNDS.get(packed[0].dtype, _PARITY_BOUNDS_HALF)
        isolation = _largest(_others(packed), _others(changed)) / scale
        report = ExactnessReport(
            model_type=model_type(model),
            backend=", ".join(sorted(set(state.backends.resolved.values()))) or "the model's own attention",
            dtype=str(packed[0].dtype).removeprefix("torch."),
            lengths=probe.lengths,
            isolation=isolation,
            parity=difference(packed, alone) / scale,
            noise=noise,
            control=_largest(_others(bare), _others(bare_changed)) / scale,
            threshold=min(max(_NOISE_FACTOR * noise, floor), ceiling),
            first_leak=probe.first_leak() if isolation > 0 else None,
        )
    return report


def _bite(windows: list[int]) -> tuple[int, ...]:
    """Lengths whose longest document outgrows every window that can be outgrown cheaply."""
    outgrown = [window + 3 for window in windows if 0 < window < _LONGEST]
    return tuple(max([length, *outgrown]) if i == _CHANGED else length for i, length in enumerate(_LENGTHS))


class _Probe:
    """One small packed batch and the ways to run it."""

    def __init__(self, model: nn.Module, lengths: tuple[int, ...], seed: int) -> None:
        self.model, self.lengths = model, lengths
        self.device = next(p.device for p in model.parameters())
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        draw = [torch.randint(1, vocabulary, (n,), generator=generator) for n in (*lengths, lengths[_CHANGED])]
        self.tokens, other = draw[:-1], draw[-1]
        self.changed = [other if i == _CHANGED else tokens for i, tokens in enumerate(self.tokens)]

    def packed(self, tokens: list[torch.Tensor], *, boundaries: bool = True) -> list[torch.Tensor]:
        """Logits `(length, V)` of each document, from one packed row."""
        batch = self._batch(tokens)
        if not boundaries:
            batch = {"input_ids": batch["input_ids"]}
        logits = self.model(**batch, use_cache=False).logits
        return list(PackedLayout.from_lengths(self.lengths).split(logits))

    def alone(self) -> list[torch.Tensor]:
        """The same, each document by itself."""
        return [self.model(input_ids=ids[None].to(self.device), use_cache=False).logits[0] for ids in self.tokens]

    def padded(self) -> list[torch.Tensor]:
        """The same, from one right-padded batch, which causal attention needs no mask for."""
        rows = nn.utils.rnn.pad_sequence(self.tokens, batch_first=True).to(self.device)
        logits = self.model(input_ids=rows, use_cache=False).logits
        return [row[:length] for row, length in zip(logits, self.lengths, strict=True)]

    def first_leak(self) -> str | None:
        """Name of the first module whose output for another document moves when one document is replaced."""
        before, after = self._outputs(self.tokens), self._outputs(self.changed)
        for (name, left), (_, right) in zip(before, after, strict=True):
            if _largest(_others(left), _others(right)) > 0:
                return name
        return None

    def _batch(self, tokens: list[torch.Tensor]) -> dict[str, Any]:
        batch = DataCollatorForPacking()([{"input_ids": ids.tolist()} for ids in tokens])
        del batch["labels"]
        return {k: v.to(self.device) if hasattr(v, "to") else v for k, v in batch.items()}

    def _outputs(self, tokens: list[torch.Tensor]) -> list[tuple[str, tuple[torch.Tensor, ...]]]:
        """Every module's per-token output, in the order in which they finish."""
        seen: list[tuple[str, tuple[torch.Tensor, ...]]] = []
        split = PackedLayout.from_lengths(self.lengths).split

        def watch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, torch.Tensor) and output.shape[:2] == (1, sum(self.lengths)):
                    seen.append((name, split(output.detach())))

            return hook

        handles = [module.register_forward_hook(watch(name)) for name, module in self.model.named_modules()]
        try:
            self.packed(tokens)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def _others(documents: Any) -> list[torch.Tensor]:
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


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and afterwards every module's mode and the random state as before."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
