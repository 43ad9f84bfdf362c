"""The Hub's FlashAttention kernel, as transformers loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def hub_flash_attn_varlen_func() -> Callable[..., torch.Tensor] | None:
    """Return `flash_attn_varlen_func` of the Hub kernel for `flash_attention_2`, `None` if it does not load."""
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    try:
        functions, _ = lazy_import_flash_attention("flash_attention_2")
    except (ImportError, OSError, ValueError, RuntimeError) as error:  # no network, no build for this machine
        logger.info("trl-packfa: the Hub's FlashAttention kernel did not load: %s", error)
        return None
    # The functions are: flash, varlen, with a KV cache, pad, unpad.
    return functions[1]
