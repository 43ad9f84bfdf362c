"""PEFT's tuners and transformers' quantizers under packing: which are exact, which are refused, which must be proven.

`table.py` reads what `measure.py` found for `kinds.py`, and refuses by it; `quantizers.py` reads quantized models.
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
