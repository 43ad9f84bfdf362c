"""Packed attention on any device, by `torch.nn.functional.scaled_dot_product_attention`.

Documents of similar length are right-padded into one batch. Causal attention over right padding needs no mask, because
padding comes after every real token. Sliding windows, softcap and sinks run in chunks of queries over the keys that
the chunk can see. So no tensor is quadratic in the row; the largest temporary is a band.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim, G documents of a group, L their
longest length, Q queries of a chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from ..runtime.autocast import autocast_dtype, cast_to_autocast_dtype
from ..runtime.length_groups import group_by_length, pack_groups, pad_groups
from .base import AttentionArguments, AttentionCall, AttentionRequest
from .capabilities import Capabilities
from .cpu_half import CausalInHalf, has_two_halves, is_faster_in_float32
from .reference import dense_attention

_CHUNK_QUERIES = 256
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SdpaBackend:
    """Attention backend that runs groups of documents of similar length through torch's fused attention."""

    name = "sdpa"
    summary = "torch's scaled_dot_product_attention per group of similar documents; no mask, any device and dtype"
    # Features that the fused kernels lack run in chunks of queries.
    capabilities = Capabilities(function="scaled_dot_product_attention", keys_apart=False)

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List no reasons: this backend supports every request."""
        return self.capabilities.refusals(request)

    def is_traceable(self, device: torch.device) -> bool:
        """Return false: a loop over groups of documents is not traceable."""
        return False

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention, see [`AttentionBackend`]."""
        layout = call.layout.queries
        batches = zip(*(pad_groups(tensor, layout) for tensor in (query, key, value)), strict=True)
        numbers = layout.split(torch.arange(layout.num_tokens, device=query.device)) if call.bias else ()
        outputs: list[torch.Tensor] = []
        dtype = autocast_dtype(query) or query.dtype
        for group, batch in zip(group_by_length(layout.lengths, query.device), batches, strict=True):
            q_GNLH, k_GKLH, v_GKLH = (tensor.transpose(1, 2) for tensor in batch)
            tokens_GL = _pad_numbers([numbers[i] for i in group], layout.num_tokens) if numbers else None
            if is_faster_in_float32(q_GNLH, dtype, fused=_is_fused(call)):
                with torch.autocast(query.device.type, enabled=False):
                    out_GNLH = _attend(q_GNLH.float(), k_GKLH.float(), v_GKLH.float(), call, tokens_GL)
            else:
                out_GNLH = _attend(q_GNLH, k_GKLH, v_GKLH, call, tokens_GL)
            outputs.append(out_GNLH.transpose(1, 2).to(dtype))
        return pack_groups(outputs, layout)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: AttentionArguments,
    tokens_GL: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of a right-padded group, in one call if torch's fused function supports all arguments.

    Otherwise compute it in chunks of queries. `tokens_GL` holds the indices of the packed tokens, for a bias.
    """
    fits_window = arguments.sliding_window is None or query.shape[2] <= arguments.sliding_window
    if not fits_window or not _is_fused(arguments) or tokens_GL is not None:
        return _in_chunks(query, key, value, arguments, tokens_GL)
    dtype = autocast_dtype(query) or query.dtype
    if arguments.dropout == 0 and has_two_halves(query, value, dtype):
        qkv = (tensor.to(dtype) for tensor in (query, key, value))
        return CausalInHalf.apply(*qkv, arguments.scaling)  # type: ignore[return-value]
    return _causal(query, key, value, arguments)


def _is_fused(arguments: AttentionArguments) -> bool:
    """Tell whether torch's fused function supports these arguments: it has no softcap and no sinks."""
    return arguments.softcap is None and arguments.sinks is None


def _pad_numbers(numbers: list[torch.Tensor], padding: int) -> torch.Tensor:
    """Pad the token indices of G documents on the right to `(G, L)`, with an index that no token has."""
    return pad_sequence(numbers, batch_first=True, padding_value=padding)


def _kernels(device: str) -> AbstractContextManager[Any]:
    """Exclude cuDNN's kernel from torch's choice on CUDA, for a `with` block.

    torch prefers cuDNN on Hopper. cuDNN plans a graph on the host for every new shape, tens of milliseconds each, and
    a packed batch has dozens of new shapes.
    """
    return sdpa_kernel(_KERNELS) if device == "cuda" else nullcontext()


def _shares_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, dropout: float
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
    call = SDPAParams(query, key, value, allowed, dropout, allowed is None, True)
    return can_use_flash_attention(call) or can_use_efficient_attention(call)


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: AttentionArguments,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute fused attention of a right-padded group.

    It is causal without `allowed`. `allowed` is a bool mask of the keys that a chunk sees, or a float tensor that is
    added to the scores.
    """
    repeats = query.shape[1] // key.shape[1]
    with _kernels(query.device.type):
        enable_gqa = _shares_heads(query, key, value, allowed, arguments.dropout)
        if repeats > 1 and not enable_gqa:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            allowed,
            dropout_p=arguments.dropout,
            is_causal=allowed is None,
            scale=arguments.scaling,
            enable_gqa=enable_gqa,
        )


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: AttentionArguments,
    tokens_GL: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of a right-padded group for `_CHUNK_QUERIES` queries at a time, over the keys they can see."""
    window = arguments.sliding_window or query.shape[2]
    fused = _is_fused(arguments)

    def attend(start: int, first_key: int, stop: int) -> torch.Tensor:
        index = torch.arange(first_key, stop, device=query.device)
        distance = index[start - first_key :, None] - index[None, :]
        allowed = (distance >= 0) & (distance < window)
        q, k, v = query[:, :, start:stop], key[:, :, first_key:stop], value[:, :, first_key:stop]
        bias: torch.Tensor | None = None
        if arguments.bias is not None and tokens_GL is not None:
            bias = arguments.bias(tokens_GL[:, start:stop], tokens_GL[:, first_key:stop]).to(q.dtype)
        if not fused:
            return dense_attention(q, k, v, allowed, arguments, bias)
        return _causal(q, k, v, arguments, allowed if bias is None else bias.masked_fill(~allowed, float("-inf")))

    outputs = []
    for start in range(0, query.shape[2], _CHUNK_QUERIES):
        span = (start, max(0, start - window + 1), min(start + _CHUNK_QUERIES, query.shape[2]))
        if torch.is_grad_enabled():
            # The backward computes the scores of a chunk again, so that only one chunk's scores exist at a time.
            outputs.append(checkpoint(attend, *span, use_reentrant=False))
        else:
            outputs.append(attend(*span))
    return torch.cat(outputs, dim=2)
