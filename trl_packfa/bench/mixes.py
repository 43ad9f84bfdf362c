"""Document lengths for measurements: real lengths from files, and mixes that show different costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import InvalidConfig
from ..plan.gather import read_length_list

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _log_normal(median: float, spread: float) -> Draw:
    return lambda rng, count: np.exp(rng.normal(np.log(median), spread, count)).astype(int) + 1


# Functions by name that draw `count` lengths in tokens.
MIXES: dict[str, Draw] = {
    "short": lambda rng, count: np.full(count, 128),
    "even": _log_normal(150, 0.35),  # like arithmetic problems: mean 160, 1 % above 340
    "uneven": _log_normal(170, 1.0),  # like FLAN: mean 280, 1 % above 1,700
    "long": lambda rng, count: np.full(count, 4096),
    "whole": lambda rng, count: np.full(count, 2**30),  # one document fills the whole row
}
_DRAWN = 20_000


def every_length(mix: str, *, seed: int) -> list[int]:
    """Return the document lengths of a dataset: all of a JSON file, or 20,000 of a mix, as in the paper's datasets."""
    return draw_lengths(mix, _DRAWN, seed=seed).tolist() if mix in MIXES else read_length_list(mix).tolist()


def draw_lengths(mix: str, count: int, *, seed: int) -> np.ndarray:
    """Draw `count` document lengths from a mix or, if `mix` is a path, from a JSON list.

    Raises:
        [`InvalidConfig`]: if `mix` is neither.
    """
    rng = np.random.default_rng(seed)
    if mix in MIXES:
        return MIXES[mix](rng, count)
    if not mix.endswith(".json"):
        raise InvalidConfig(f"there is no mix of lengths '{mix}'.", do=f"Pass {', '.join(MIXES)}, or a .json file.")
    return rng.choice(read_length_list(mix), count)
