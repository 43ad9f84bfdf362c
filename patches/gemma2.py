"""Gemma-2: soft-capped scores, sliding windows in every other layer."""

from trl_packfa.patches.base import Patch
from trl_packfa.patches.llama import rotary_qkv

PATCH = Patch(model_types=("gemma2",), backbone="Gemma2Model", attention={"Gemma2Attention": rotary_qkv})
