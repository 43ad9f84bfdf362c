"""Small random models of every causal-LM type of transformers, for checking that packing is exact on them."""

from __future__ import annotations

from trl_packfa.zoo.build import all_types, small_config, small_model
from trl_packfa.zoo.sizes import NOT_BUILDABLE

__all__ = ["NOT_BUILDABLE", "all_types", "small_config", "small_model"]
