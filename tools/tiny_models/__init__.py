"""Small random models of every causal-LM type of transformers, to check that packing is exact on them."""

from __future__ import annotations

from tiny_models.build import all_types, small_config, small_model
from tiny_models.sizes import NOT_BUILDABLE

__all__ = ["NOT_BUILDABLE", "all_types", "small_config", "small_model"]
