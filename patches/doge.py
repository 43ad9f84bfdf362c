"""Doge: normalized rotary attention with a dynamic mask, a bias of each key that depends on its value."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from trl_packfa.attention import Bias, key_bias
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.base import AttentionPatch
from trl_packfa.patches.mistral import config_window
from trl_packfa.patches.qwen3 import normed_rotary_qkv


def dynamic_mask(module: Any, value: torch.Tensor, layout: PackedLayout) -> Bias:
    """Make the bias `exp(A * softplus(dt_proj(value)))` of each key and head.

    A query with more than `keep_window_size` keys attends to the keys with the largest bias.
    """
    # `dt_proj` takes all key/value heads of a token side by side: `(T, K, H)` becomes `(T, K * H)`.
    bias_TK = torch.exp(module.A * F.softplus(module.dt_proj(value.flatten(1))))
    return key_bias(
        # Query heads that share a key share its bias, as in `repeat_kv`.
        bias_TK.repeat_interleave(module.num_key_value_groups, dim=-1),
        keep=module.keep_window_size,
        sliding_window=module.config.sliding_window,
    )


PATCH = AttentionPatch(
    model_types=("doge",),
    backbone="DogeModel",
    attention={"DogeAttention": normed_rotary_qkv},
    arguments=config_window,  # `DogeAttention` has none: transformers puts the window into the mask only
    bias=dynamic_mask,
)
