"""PEFT's adapters and transformers' quantizers under packing: exact, refused, or to be checked on the user's model."""

from .quantizers import refuse_quantization as refuse_quantization
from .table import refuse_adapter as refuse_adapter
from .verdicts import verdicts_on as verdicts_on
