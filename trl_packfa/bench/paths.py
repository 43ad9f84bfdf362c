"""Attention functions of each side: our backends, and transformers' own mask and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..attention import BACKENDS, AttentionArguments, AttentionRequest, get_backend
from ..layout import PackedLayout

TRANSFORMERS, TRANSFORMERS_FLEX = "transformers-sdpa", "transformers-flex"
Attend = Callable[..., torch.Tensor]
# Bytes of the dense path per pair of query and key: the mask as bool and as float, and temporary results.
_DENSE_BYTES = 12


def attention_sides(request: AttentionRequest) -> dict[str, str]:
    """Return every side with the reason why it cannot run on this machine; an empty string if it can."""
    sides = {b.name: "; ".join(b.refusals(request)) for b in BACKENDS if b.capabilities.is_selectable}
    flex = "" if request.device.type == "cuda" else "on a CPU, flex_attention has no backward"
    return {**sides, TRANSFORMERS: "", TRANSFORMERS_FLEX: flex}


def dense_bytes(tokens: int) -> int:
    """Return the bytes of transformers' T x T mask and of the attention with it."""
    return _DENSE_BYTES * tokens * tokens


def attend_with(side: str, layout: PackedLayout, *, heads: int, key_value_heads: int, head_dim: int) -> Attend:
    """Return the attention function of a side: query `(T, N, H)`, key and value `(T, K, H)` to output `(T, N, H)`."""
    if side not in (TRANSFORMERS, TRANSFORMERS_FLEX):
        arguments = AttentionArguments(scaling=head_dim**-0.5)
        return lambda query, key, value: get_backend(side)(query, key, value, arguments.on(layout.attention))
    return _transformers(side, layout, heads, key_value_heads, head_dim)


def _transformers(side: str, layout: PackedLayout, heads: int, key_value_heads: int, head_dim: int) -> Attend:
    """Return an attention that calls transformers' own mask and attention functions, as an unpatched Llama does."""
    from transformers import AttentionInterface, LlamaConfig
    from transformers.masking_utils import create_causal_mask

    name = "sdpa" if side == TRANSFORMERS else "flex_attention"
    config = LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads)
    config._attn_implementation = name
    attention: Any = AttentionInterface()[name]
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // key_value_heads, True
    positions = layout.position_ids()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        embeddings = qkv[0].new_empty(1, layout.num_tokens, 1)
        mask = create_causal_mask(config, embeddings, None, None, position_ids=positions)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in qkv)
        return attention(module, query, key, value, mask, scaling=head_dim**-0.5)[0][0]

    return attend
