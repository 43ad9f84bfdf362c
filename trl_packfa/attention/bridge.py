"""Where packed attention meets transformers: its attention interface, and the kernels it loads.

The one file of this folder that imports it.

Shape letters: B rows, L row length, T packed tokens (B * L), N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from ..errors import PackingError
from ..layout import PackedLayout
from .request import AttentionArguments, AttentionRequest
from .resolve import BackendChoice

logger = logging.getLogger(__name__)


def hub_flash_attn_varlen_func() -> Callable[..., torch.Tensor] | None:
    """`flash_attn_varlen_func` of the Hub kernel that transformers loads for `flash_attention_2`, if it loads."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    try:
        functions, _ = lazy_import_flash_attention("flash_attention_2")
    except (ImportError, OSError, ValueError, RuntimeError) as error:  # no network, no build for this machine
        logger.info("trl-packfa: the Hub's FlashAttention kernel did not load: %s", error)
        return None
    return functions[1]


# The name under which transformers' attention interface knows us; chosen per module, never for a whole model.
INTERFACE = "trl_packfa"


def interface_config(config: PreTrainedConfig, backends: BackendChoice) -> PreTrainedConfig:
    """A copy of an attention module's config that sends its attention here, and elsewhere what is not packed."""
    ours = copy.copy(config)
    vars(ours).update(_attn_implementation_internal=INTERFACE, trl_packfa_source=config, trl_packfa_backends=backends)
    return ours


def uses_interface(module: nn.Module) -> bool:
    """Whether a module computes attention through transformers' attention interface."""
    code = getattr(type(module).forward, "__code__", None)
    return hasattr(module, "config") and code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def tells_window(module: nn.Module) -> bool:
    """Whether a module tells its attention function the sliding window, and not the mask alone."""
    constants = type(module).forward.__code__.co_consts
    return any("sliding_window" in names for names in constants if isinstance(names, tuple))


def packed_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: `query` `(B, N, L, H)`, `key` and `value` `(B, K, L, H)` to `(B, L, N, H)`.

    The layout comes with the arguments, or on the mask where a model passes masks but no other arguments to its
    layers. Without one, the model's own attention function runs.
    """
    layout: PackedLayout | None = kwargs.pop("packed_layout", None)
    layout = getattr(attention_mask, "packed_layout", None) if layout is None else layout
    options = {"scaling": scaling, "dropout": dropout}
    optional = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    options |= {name: option for name, option in optional.items() if option is not None}
    if layout is None:
        return _own_attention(module)(module, query, key, value, attention_mask, **options, **kwargs)
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise PackingError(f"{type(module).__name__} attends in both directions, packed attention is causal.")
    arguments = AttentionArguments(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    q_TNH, k_TKH, v_TKH = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    backend = module.config.trl_packfa_backends.for_request(AttentionRequest.of(q_TNH, k_TKH, arguments))
    out_TNH = backend(q_TNH, k_TKH, v_TKH, layout, arguments)
    return out_TNH.view(query.shape[0], query.shape[2], *out_TNH.shape[1:]), None


def _own_attention(module: Any) -> Callable[..., Any]:
    """The attention function that the module would call unpatched."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = module.config.trl_packfa_source._attn_implementation
    return AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]


AttentionInterface.register(INTERFACE, packed_attention_forward)
