"""Differences between two runs, and the differences allowed; these statistics do not grow with vocabulary or length.

Shape letters: S documents, n tokens of one, D features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeAlias, TypeVar

import torch

from ..comparison import NOISE_FACTOR, TOLERANCES, Comparison
from .runs import Key

# Very small tokens and gradients are compared with this share of the usual size instead of their own.
_SMALL, _SMALL_GRADIENT = 1e-1, 1e-2
_K = TypeVar("_K")
# By traced tensor and document.
Differences: TypeAlias = "dict[tuple[Key, int], float]"


def relative_difference(actual: torch.Tensor, expected: torch.Tensor, *, typical: bool = False) -> float:
    """Return `|actual - expected| / |expected|` of the tokens of `(n, ...)`, infinite if a value is not finite.

    It is the root mean square over the tokens, or the median if `typical`.
    """
    actual_nD, expected_nD = actual.flatten(1).float(), expected.flatten(1).float()
    sizes_n = expected_nD.square().sum(1)
    # A very small token is compared with a tenth of the mean size; `tiny` is for references that are all 0.
    sizes_n = torch.maximum(sizes_n, _SMALL**2 * sizes_n.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    squares_n = (actual_nD - expected_nD).square().sum(1) / sizes_n
    if not bool(squares_n.isfinite().all()):
        return float("inf")
    return float((squares_n.median() if typical else squares_n.mean()).sqrt())


def relative_logits(actual: torch.Tensor, expected: torch.Tensor, *, typical: bool = False) -> float:
    """Return [`relative_difference`] of logits `(n, V)`, each token's mean subtracted: softmax ignores it."""
    actual_nV, expected_nV = (x.float() - x.float().mean(-1, keepdim=True) for x in (actual, expected))
    return relative_difference(actual_nV, expected_nV, typical=typical)


def routed_difference(actual: torch.Tensor, expected: torch.Tensor, *, typical: bool = False) -> float:
    """Return the [`relative_difference`] of a router's outputs `(n, ...)`: of choices, 1 for a token with another one.

    Masked scores are equal if both are masked.
    """
    if actual.is_floating_point():
        masked = (actual == expected) & ~actual.isfinite()
        return relative_difference(actual.masked_fill(masked, 0), expected.masked_fill(masked, 0), typical=typical)
    off_n = (actual != expected).flatten(1).any(1).float()
    return float((off_n.median() if typical else off_n.mean()).sqrt())


def judged(
    kind: str,
    found: Mapping[_K, float],
    noise: Mapping[_K, float],
    least: Callable[[_K], float],
    where: Callable[[_K], str],
    *,
    factor: float = NOISE_FACTOR,
) -> list[Comparison]:
    """Return a comparison for each difference in `found`, beside what rounding changes there, in `noise`.

    `least` and `where` are functions of its key.
    """
    # Noise is one random draw of rounding. If it is small by chance, the model's median noise is used.
    usual = median(noise.values()) if noise else 0.0
    return [
        Comparison.beside_rounding(
            kind, difference, max(noise.get(key, 0.0), usual), least(key), factor=factor, where=where(key)
        )
        for key, difference in found.items()
    ]


def judged_layers(found: Differences, noise: Differences, dtype: torch.dtype) -> list[Comparison]:
    """Return a comparison for each layer and document, in forward order."""
    return judged("parity", found, noise, lambda at: TOLERANCES[dtype].outputs, lambda at: at[0].module)


def relative_gradients(names: Iterable[str], found: Sequence[float], norms: Sequence[float]) -> dict[str, float]:
    """Divide `found`, the norms of the parameters' gradient differences, by the gradients' own `norms`; by `names`."""
    total = sum(norm**2 for norm in norms) ** 0.5
    if not math.isfinite(total):  # after an overflow no difference has a meaning
        return dict.fromkeys(names, math.inf)
    # A hundredth of the root mean square of all norms. The gradient of a bias in front of a softmax, for example, is
    # only rounding, and would be off by 100 %.
    small = max(_SMALL_GRADIENT * total / len(norms) ** 0.5, torch.finfo(torch.float32).tiny)
    return {name: off / max(norm, small) for name, off, norm in zip(names, found, norms, strict=True)}


def largest(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> float:
    """Return the largest absolute difference over pairs of tensors; infinite if one of them is not finite."""
    pairs = ((a, b) for a, b in zip(left, right, strict=True) if not torch.equal(a, b))  # do not copy equal ones
    return max((nan_as_inf(float((a.float() - b.float()).abs().max())) for a, b in pairs), default=0.0)


def nan_as_inf(value: float) -> float:
    """Return infinity for NaN, which `max` drops unless it comes first."""
    return math.inf if math.isnan(value) else value


def share(found: float, size: float) -> float:
    """Return `found` in units of `size`; with a size of 0 it is 0 for nothing, and infinite for anything else."""
    if size == 0:
        return 0.0 if found == 0 else float("inf")
    return found / size
