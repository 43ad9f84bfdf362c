"""Fused LoRA layers, which compute the low-rank update together with the base product.

This avoids separate passes over the activations. `projections.py` reads PEFT's layers and says why a layer cannot be
fused. `products.py` has the forward and the backward. `overrides.py` has the forwards that a patch puts on modules,
and `activated.py` has those of PEFT's activated LoRA. Parameters stay in PEFT's layers.
"""

from .activated import activated_overrides as activated_overrides
from .activated import invocations_of as invocations_of
from .activated import require_in_packed_rows as require_in_packed_rows
from .activated import require_patched as require_patched
from .overrides import adapted_layers as adapted_layers
from .overrides import describe_lora as describe_lora
from .overrides import lora_overrides as lora_overrides
from .overrides import project_together as project_together
