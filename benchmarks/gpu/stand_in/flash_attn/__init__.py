"""flash-attn 2's functions on the FlashAttention that torch brings (`torch.nn.attention.varlen.varlen_attn`).

It serves GPU machines without network: flash-attn has no wheel on PyPI and cannot be built there. transformers and TRL
find `flash_attention_2` here and run torch's kernels, which are those of FlashAttention 2. Only the functions for
training exist: softcap, ALiBi and KV cache are not in the signatures, so callers refuse them, and dropout raises. The
version `2.8.3+torch.varlen` shows on every table that this is not flash-attn.

Shape letters: B rows, L row length, T packed tokens, N query heads, K key/value heads, H head dim, S documents.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

__version__ = "2.8.3+torch.varlen"
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Compute attention inside each document; returns `(T, N, H)`.

    `q` is `(T, N, H)`, `k` and `v` are `(T, K, H)` in half precision, boundaries are `(S + 1,)` in int32.
    `softmax_scale` is `H ** -0.5` by default.

    Raises:
        `ValueError`: for dropout, which torch's function does not have.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: the stand-in for flash-attn has no dropout. Set attention_dropout=0."
        )
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "window_size": (window_size[0], 0 if causal else window_size[1]),
    }
    if "enable_gqa" in _PARAMETERS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    longest = int(max_seqlen_q), int(max_seqlen_k)
    out = varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **options)
    assert isinstance(out, torch.Tensor)
    return out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Compute attention for rows without padding: `q` `(B, L, N, H)`, `k` and `v` `(B, L, K, H)` to `(B, L, N, H)`."""
    rows, length = q.shape[:2]
    assert k.shape[1] == length, "queries and keys of one length: there is no KV cache"
    bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        q, k, v, bounds, bounds, length, length, dropout_p, softmax_scale, causal, window_size
    )
    return out.unflatten(0, (rows, length))


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Raise: there is no KV cache; transformers only imports the name, and training never calls it."""
    raise RuntimeError("the stand-in for flash-attn has no KV cache; it is for training")
