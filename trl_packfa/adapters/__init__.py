"""PEFT's adapters and transformers' quantizers under packing: exact, refused, or to be checked on the user's model."""

from .quantizers import refuse_quantization as refuse_quantization
from .quantizers import refuse_quantized as refuse_quantized
from .quantizers import unread_quantizers as unread_quantizers
from .table import adapter_kinds as adapter_kinds
from .table import refuse_adapter as refuse_adapter
from .table import refuse_adapters as refuse_adapters
from .table import unmeasured_adapters as unmeasured_adapters
