"""Granite: Llama's attention scaled by `attention_multiplier`.

The embedding, residual and logit multipliers are applied outside of attention, so transformers' code computes them.
"""

from trl_packfa.patches.base import Patch
from trl_packfa.patches.llama import rotary_qkv

PATCH = Patch(model_types=("granite",), backbone="GraniteModel", attention={"GraniteAttention": rotary_qkv})
