"""Fused LoRA layers, which compute the low-rank update together with the base product.

This avoids separate passes over the activations. `projections.py` reads PEFT's layers and says why a layer cannot be
fused. `products.py` has the forward and the backward. `overrides.py` has the forwards that a patch puts on modules,
and `activated.py` has those of PEFT's activated LoRA. Parameters stay in PEFT's layers.
"""

from __future__ import annotations

from .activated import activated_overrides, invocations_of, require_in_packed_rows, require_patched
from .overrides import adapted_layers, describe_lora, lora_overrides, project_together

__all__ = [
    "activated_overrides",
    "adapted_layers",
    "describe_lora",
    "invocations_of",
    "lora_overrides",
    "project_together",
    "require_in_packed_rows",
    "require_patched",
]
