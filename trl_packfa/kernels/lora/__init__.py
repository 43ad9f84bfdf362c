"""Fused LoRA layers, which compute the low-rank update with the base product. PEFT's layers keep the parameters."""

from .activated import activated_overrides as activated_overrides
from .activated import invocations_of as invocations_of
from .activated import require_in_packed_rows as require_in_packed_rows
from .activated import require_patched as require_patched
from .overrides import adapted_layers as adapted_layers
from .overrides import describe_lora as describe_lora
from .overrides import lora_overrides as lora_overrides
from .overrides import project_together as project_together
