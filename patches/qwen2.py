"""Qwen2 and Qwen2.5: Llama's attention with biases and, in some layers, a sliding window."""

from trl_packfa.patches.base import AttentionPatch
from trl_packfa.patches.llama import rotary_qkv

PATCH = AttentionPatch(model_types=("qwen2",), backbone="Qwen2Model", attention={"Qwen2Attention": rotary_qkv})
