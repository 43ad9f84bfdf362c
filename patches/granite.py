"""Granite: Llama's attention scaled by `attention_multiplier`.

The embedding, residual and logit multipliers are applied outside of attention, so transformers' code computes them.
"""

from trl_packfa.patches.base import AttentionPatch
from trl_packfa.patches.llama import rotary_qkv

PATCH = AttentionPatch(model_types=("granite",), backbone="GraniteModel", attention={"GraniteAttention": rotary_qkv})
