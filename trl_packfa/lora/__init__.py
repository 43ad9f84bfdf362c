"""LoRA layers whose low-rank update rides in the base product, instead of in passes of its own over the activations.

`projections.py` reads PEFT's layers and says why one cannot be served, `products.py` holds the forward and backward,
`overrides.py` the forwards that a patch puts on an instance. Parameters stay where PEFT has put them.
"""

from __future__ import annotations

from .overrides import adapted_layers, describe_lora, fused_overrides, project_together

__all__ = ["adapted_layers", "describe_lora", "fused_overrides", "project_together"]
