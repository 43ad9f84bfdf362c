"""Granite: Llama's attention scaled by `attention_multiplier`.

The embedding, residual and logit multipliers are applied outside of attention and stay transformers' own.
"""

from trl_packfa.patches.llama import rotary_qkv
from trl_packfa.patching import Patch

PATCH = Patch(model_types=("granite",), backbone="GraniteModel", attention={"GraniteAttention": rotary_qkv})
