"""Gemma-2: soft-capped scores, sliding windows in every other layer."""

from trl_packfa.patches.base import AttentionPatch
from trl_packfa.patches.llama import rotary_qkv

PATCH = AttentionPatch(model_types=("gemma2",), backbone="Gemma2Model", attention={"Gemma2Attention": rotary_qkv})
