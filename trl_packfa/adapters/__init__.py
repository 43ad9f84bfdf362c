"""PEFT's adapters and transformers' quantizers under packing: exact, refused, or to be checked on the user's model.

`table.py` reads the measurements in `adapters.json` and refuses adapters that were measured wrong. `quantizers.py`
refuses quantized models.
"""

from __future__ import annotations

from .quantizers import refuse_quantization, refuse_quantized, unread_quantizers
from .table import adapter_kinds, refuse_adapter, refuse_adapters, unmeasured_adapters

__all__ = [
    "adapter_kinds",
    "refuse_adapter",
    "refuse_adapters",
    "refuse_quantization",
    "refuse_quantized",
    "unmeasured_adapters",
    "unread_quantizers",
]
