"""Find and drop caches in a forward call.

This module alone knows the names that transformers gives a cache: 5.24 renamed `past_key_values` and `cache_params` to
`cache`.
"""

from __future__ import annotations

from typing import Any

# `cache` since transformers 5.24; before it keys and values, states, and RWKV's list of states.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def has_cache(call: dict[str, Any]) -> bool:
    """Tell whether a call has a cache, filled or empty."""
    return any(call.get(name) is not None for name in CACHES)


def filled_cache(call: dict[str, Any]) -> str | None:
    """Return the name of the argument by which a call continues an earlier one, `None` if it begins anew."""
    return next((name for name in CACHES if _is_filled(call.get(name))), None)


def without_caches(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without caches; every forward takes none by default."""
    return {name: value for name, value in call.items() if name not in CACHES}


def is_continuous_batching(call: dict[str, Any]) -> bool:
    """Tell whether a call comes from transformers' continuous batching (`generate_batch`).

    Such calls are generation over a paged cache: their `cu_seq_lens_k`, one for each kind of layer, count what is
    cached.
    """
    return isinstance(call.get("cu_seq_lens_k"), dict)


def _is_filled(cache: Any) -> bool:
    """Tell whether a cache holds tokens; one that has no length counts as filled."""
    try:
        return cache is not None and cache.get_seq_length() > 0
    except (AttributeError, ValueError):
        return True
