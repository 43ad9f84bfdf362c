"""Packed attention on any device, by `torch.nn.functional.scaled_dot_product_attention`.

Documents of similar length are right-padded into one batch. Causal attention over right padding needs no mask, because
padding comes after every real token; without causality, a mask of the keys hides it. Sliding windows, softcap and
sinks run in chunks of queries over the keys that the chunk can see. So no tensor is quadratic in the row; the largest
temporary is a band.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim, G documents of a group, L their
longest length, M their keys, Q queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from ..autocast import HALF, autocast_dtype, cast_to_autocast_dtype, has_half_products
from ..layout import PackedLayout
from ..layout.length_groups import group_by_length, pack_groups, pad_groups
from .base import AttentionArguments, AttentionCall
from .capabilities import AttentionBackend, Capabilities
from .reference import dense_attention

_CHUNK_QUERIES = 256
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SdpaBackend(AttentionBackend):
    """Attention backend that runs groups of documents of similar length through torch's fused attention."""

    name = "sdpa"
    summary = "torch's scaled_dot_product_attention per group of similar documents; no mask, any device and dtype"
    # Features that the fused kernels lack run in chunks of queries, and so do queries after a shared prefix: torch's
    # causal mask begins at the first query. A pair of query and key costs about 1.5 times as much then: a mask is
    # read, and the backward computes scores again (measured on a CPU, 30 to 200 queries after 20 to 1,100 keys).
    capabilities = Capabilities(function="scaled_dot_product_attention", cost_after_prefix=1.5, bidirectional=True)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        if call.layout.has_own_keys:
            return self._attend_by_segment(query, key, value, call)
        layout = call.layout.queries
        batches = zip(*(pad_groups(tensor, layout) for tensor in (query, key, value)), strict=True)
        numbers = layout.split(torch.arange(layout.num_tokens, device=query.device)) if call.bias else ()
        outputs: list[torch.Tensor] = []
        for group, batch in zip(group_by_length(layout.lengths, query.device), batches, strict=True):
            tokens_GL = None
            if numbers:  # padding gets an index that no token has
                own = [numbers[i] for i in group]
                tokens_GL = pad_sequence(own, batch_first=True, padding_value=layout.num_tokens)
            lengths = [layout.lengths[i] for i in group]
            q_GLNH, k_GLKH, v_GLKH = batch
            outputs.append(_attend_batch(q_GLNH, k_GLKH, v_GLKH, call, tokens_GL, lengths))
        return pack_groups(outputs, layout)

    def _attend_by_segment(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute segments with more keys than queries one by one, the others as documents."""
        queries, keys = call.layout.queries, call.layout.keys
        segments = list(zip(queries.split(query), keys.split(key), keys.split(value), strict=True))
        whole = [i for i in range(len(segments)) if call.layout.causal and queries.lengths[i] == keys.lengths[i]]
        outputs: dict[int, torch.Tensor] = {}
        if whole:
            if "whole" not in call.layout.memo:
                lengths = [queries.lengths[i] for i in whole]
                call.layout.memo["whole"] = PackedLayout.from_lengths(lengths, device=query.device)
            alone: PackedLayout = call.layout.memo["whole"]
            q, k, v = (torch.cat([segments[i][part] for i in whole]) for part in range(3))
            found = self(q, k, v, replace(call, layout=alone.attention))
            outputs = dict(zip(whole, alone.split(found), strict=True))
        for i, (q, k, v) in enumerate(segments):
            if i not in outputs:
                outputs[i] = _attend_batch(q[None], k[None], v[None], call)[0]
        return torch.cat([outputs[i] for i in range(len(segments))])


def _attend_batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    tokens_GL: torch.Tensor | None = None,
    lengths: Sequence[int] = (),
) -> torch.Tensor:
    """Compute attention of a right-padded group: query `(G, L, N, H)`, key and value `(G, M, K, H)` to `(G, L, N, H)`.

    `tokens_GL` holds the indices of the packed tokens, for a bias; `lengths` are the documents' (tokens).
    """
    q_GNLH, k_GKMH, v_GKMH = (tensor.transpose(1, 2) for tensor in (query, key, value))
    dtype = autocast_dtype(query) or query.dtype
    is_padded = not call.layout.causal and len(set(lengths)) > 1
    lengths_G = torch.tensor(lengths, device=query.device) if is_padded else None
    if _runs_in_float32(q_GNLH, dtype, call):
        with torch.autocast(query.device.type, enabled=False):
            out_GNLH = _attend(q_GNLH.float(), k_GKMH.float(), v_GKMH.float(), call, tokens_GL, lengths_G)
    else:
        out_GNLH = _attend(q_GNLH, k_GKMH, v_GKMH, call, tokens_GL, lengths_G)
    return out_GNLH.transpose(1, 2).to(dtype)


def _runs_in_float32(query: torch.Tensor, dtype: torch.dtype, call: AttentionCall) -> bool:
    """Tell whether attention in half precision runs in float32: on CPUs, where torch's fused kernel computes it.

    That kernel's gradients in half precision are three times as far off as eager attention's. Short documents are
    faster in float32, too, and CPUs that emulate half precision are so in all cases.
    """
    return dtype in HALF and query.device.type == "cpu" and (_is_fused(call) or not has_half_products(dtype, "cpu"))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    tokens_GL: torch.Tensor | None,
    lengths_G: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of a right-padded group, in one call if torch's fused function supports all arguments.

    Otherwise compute it in chunks of queries. `lengths_G` are the lengths of the documents if attention sees padding.
    """
    fits_window = call.sliding_window is None or key.shape[2] <= call.sliding_window
    if not fits_window or not _is_fused(call) or tokens_GL is not None:
        return _in_chunks(query, key, value, call, tokens_GL, lengths_G)
    if not call.layout.causal:
        allowed = None if lengths_G is None else _unpadded(torch.arange(key.shape[2], device=key.device), lengths_G)
        return _fused(query, key, value, call, allowed)
    if query.shape[2] != key.shape[2]:  # after a shared prefix
        return _in_chunks(query, key, value, call, tokens_GL, lengths_G)
    return _fused(query, key, value, call, is_causal=True)


def _unpadded(index_M: torch.Tensor, lengths_G: torch.Tensor) -> torch.Tensor:
    """Return which of these key positions hold a token, bool, `(G, 1, 1, M)`."""
    return (index_M < lengths_G[:, None])[:, None, None]


def _is_fused(arguments: AttentionArguments) -> bool:
    """Tell whether torch's fused function supports these arguments: it has no softcap and no sinks."""
    return arguments.softcap is None and arguments.sinks is None


def _kernels(device: str) -> AbstractContextManager[Any]:
    """Exclude cuDNN's kernel from torch's choice on CUDA, for a `with` block.

    torch prefers cuDNN on Hopper. cuDNN plans a graph on the host for every new shape, tens of milliseconds each, and
    a packed batch has dozens of new shapes.
    """
    return sdpa_kernel(_KERNELS) if device == "cuda" else nullcontext()


def _shares_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
) -> bool:
    """Tell whether a fused kernel of the device accepts fewer key/value heads than query heads `(G, heads, L, H)`.

    On CUDA torch is asked, because its kernels differ by version, dtype and mask. A wrong answer would lead to the
    math path, which stores L x L scores.
    """
    if key.shape[1] == query.shape[1] or query.device.type not in ("cpu", "cuda"):
        return False
    if query.device.type == "cpu":
        return True
    query, key, value = cast_to_autocast_dtype(query, key, value)
    call = SDPAParams(query, key, value, allowed, dropout, is_causal, True)
    return can_use_flash_attention(call) or can_use_efficient_attention(call)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: AttentionArguments,
    allowed: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Compute fused attention of a right-padded group.

    `allowed` is a bool mask of the keys that a query sees, or a float tensor that is added to the scores. Without it
    a query sees all keys, or, if `is_causal`, those up to its own.
    """
    repeats = query.shape[1] // key.shape[1]
    with _kernels(query.device.type):
        enable_gqa = _shares_heads(query, key, value, allowed, arguments.dropout, is_causal)
        if repeats > 1 and not enable_gqa:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            allowed,
            dropout_p=arguments.dropout,
            is_causal=is_causal,
            scale=arguments.scaling,
            enable_gqa=enable_gqa,
        )


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    tokens_GL: torch.Tensor | None,
    lengths_G: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of a right-padded group for `_CHUNK_QUERIES` queries at a time, over the keys they can see."""
    causal, keys = call.layout.causal, key.shape[2]
    window = call.sliding_window or keys
    fused = _is_fused(call)
    before = keys - query.shape[2]  # the queries are the last tokens of the keys

    def attend(start: int, stop: int, first_key: int, last_key: int) -> torch.Tensor:
        index = torch.arange(first_key, last_key, device=query.device)
        distance = torch.arange(start + before, stop + before, device=query.device)[:, None] - index
        allowed = (distance >= 0) & (distance < window) if causal else distance.abs() < window
        if lengths_G is not None:  # padding sees itself: without any key its gradient would not be a number
            allowed = (allowed & _unpadded(index, lengths_G)) | (distance == 0)
        q, k, v = query[:, :, start:stop], key[:, :, first_key:last_key], value[:, :, first_key:last_key]
        bias: torch.Tensor | None = None
        if call.bias is not None and tokens_GL is not None:
            bias = call.bias(tokens_GL[:, start:stop], tokens_GL[:, first_key:last_key]).to(q.dtype)
        if not fused:
            return dense_attention(q, k, v, allowed, call, bias)
        return _fused(q, k, v, call, allowed if bias is None else bias.masked_fill(~allowed, float("-inf")))

    outputs = []
    for start in range(0, query.shape[2], _CHUNK_QUERIES):
        stop = min(start + _CHUNK_QUERIES, query.shape[2])
        last_key = stop + before if causal else min(keys, stop + before + window - 1)
        span = (start, stop, max(0, start + before - window + 1), last_key)
        if torch.is_grad_enabled():
            # The backward computes the scores of a chunk again, so that only one chunk's scores exist at a time.
            outputs.append(checkpoint(attend, *span, use_reentrant=False))
        else:
            outputs.append(attend(*span))
    return torch.cat(outputs, dim=2)
