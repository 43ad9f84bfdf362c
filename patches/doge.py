"""Doge: normalized rotary attention with a dynamic mask, a bias of each key that its value decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from trl_packfa.attention import AttentionArguments, Bias, key_bias
from trl_packfa.layout import PackedLayout
from trl_packfa.patches.base import Patch, read_arguments
from trl_packfa.patches.qwen3 import normed_rotary_qkv


def with_window(module: Any) -> AttentionArguments:
    """The usual arguments, and the window that transformers puts into the mask only."""
    # `DogeAttention` has no window of its own and hands its attention function a mask only.
    return replace(read_arguments(module), sliding_window=module.config.sliding_window)


def dynamic_mask(module: Any, value: torch.Tensor, layout: PackedLayout) -> Bias:
    """`exp(A * softplus(dt_proj(value)))` of each key and head; of more keys than `keep_window_size`, a query sees
    those with the largest."""
    # Of the values, all key/value heads of a token side by side: `(T, K, H)` to `(T, K * H)`.
    bias_TK = torch.exp(module.A * F.softplus(module.dt_proj(value.flatten(1))))
    return key_bias(
        # As `repeat_kv`: query heads that share a key share its bias.
        bias_TK.repeat_interleave(module.num_key_value_groups, dim=-1),
        keep=module.keep_window_size,
        sliding_window=module.config.sliding_window,
    )


PATCH = Patch(
    model_types=("doge",),
    backbone="DogeModel",
    attention={"DogeAttention": normed_rotary_qkv},
    arguments=with_window,
    bias=dynamic_mask,
)
