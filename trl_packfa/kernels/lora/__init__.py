"""LoRA layers whose low-rank update rides in the base product, instead of in passes of its own over the activations.

`projections.py` reads PEFT's layers and says why one cannot be served, `products.py` holds the forward and backward,
`overrides.py` the forwards that a patch puts on an instance, `activated.py` those of PEFT's activated LoRA. Parameters
stay where PEFT has put them.
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
