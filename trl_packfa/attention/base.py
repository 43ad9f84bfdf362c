"""The request that a model makes to an attention backend.

Shape letters: N query heads, G documents of a group, Q queries of a chunk, M keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from ..autocast import autocast_dtype
from ..layout import AttentionLayout

# A term that is added to the scores: a function from the indices of packed queries `(G, Q)` and keys `(G, M)` to a
# tensor `(G, 1 or N, Q, M)`.
Bias: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """The arguments that a module passes to its attention (transformers' names).

    Args:
        scaling (`float`):
            Factor of the scores.
        sliding_window (`int`, *optional*):
            Number of keys that a query may attend to, with its own key.
        softcap (`float`, *optional*):
            Bound of the scores, `softcap * tanh(score / softcap)` (Gemma-2).
        sinks (`torch.Tensor`, *optional*):
            One more logit per head, shape `(N,)`, whose probability is dropped (gpt-oss).
        dropout (`float`, *optional*, defaults to `0.0`):
            Dropout rate of the probabilities.
        bias (`Bias`, *optional*):
            Term that is added to the scores, `-inf` for keys that are not chosen (sparse indexers, ALiBi). It is
            called for one chunk of queries and the keys they can see, so that no tensor is quadratic in the row.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    bias: Bias | None = None

    def on(self, layout: AttentionLayout) -> AttentionCall:
        """Return the call with these arguments on a layout."""
        return AttentionCall(
            layout=layout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout,
            bias=self.bias,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionCall(AttentionArguments):
    """All that a backend needs besides query, key and value.

    Segment i of `layout.queries` attends to segment i of `layout.keys`. If a segment has more keys, its queries are
    the last tokens. A call with a bias never has segments with keys of their own.
    """

    layout: AttentionLayout


class AttentionRequest(NamedTuple):
    """The properties of a call that decide whether a backend can serve it. Hashable, so that it is resolved once.

    `sliding_window` counts the keys that a query may attend to, with its own key (transformers' meaning). `value_dim`
    is the head dim of the values, `None` if it equals `head_dim`; multi-head latent attention (DeepSeek) has a
    different one. `causal` is false if queries see later keys too. `exceeds_int32` is true if the batch's gradients
    have more numbers than 32 bits can index. `named` is true if the user chose the backend by name; that backend may
    then load a kernel that is not installed.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_key_value_heads: int
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    bias: bool = False
    value_dim: int | None = None
    causal: bool = True
    exceeds_int32: bool = False
    named: bool = False

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> AttentionRequest:
        """Make the request of a call with these tensors, of any size: [`exceeds_int32`] is asked where it matters."""
        return cls(
            device=query.device,
            dtype=autocast_dtype(query) or query.dtype,
            head_dim=query.shape[-1],
            num_heads=query.shape[-2],
            num_key_value_heads=key.shape[-2],
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
            dropout=call.dropout,
            bias=call.bias is not None,
            value_dim=None if value.shape[-1] == query.shape[-1] else value.shape[-1],
            causal=call.layout.causal,
        )

    def describe(self) -> str:
        """Describe the request in one line for error messages."""
        parts = [f"device={self.device}", f"dtype={str(self.dtype).removeprefix('torch.')}"]
        parts += [f"head_dim={self.head_dim}", f"heads={self.num_heads}/{self.num_key_value_heads}"]
        optional = {"value_dim": self.value_dim, "window": self.sliding_window, "softcap": self.softcap}
        optional |= {"dropout": self.dropout or None}
        parts += [f"{name}={value}" for name, value in optional.items() if value is not None]
        flags = {"sinks": self.sinks, "bias": self.bias, "bidirectional": not self.causal, "huge": self.exceeds_int32}
        return " ".join(parts + [name for name, is_set in flags.items() if is_set])


# FlashAttention 2's backward indexes its padded accumulator with 32-bit integers (flash-attention issue 1311). It has
# 128 more tokens for each document, and heads are rounded up to a multiple of 32, above 192 to 256.
_PADDED_TOKENS_PER_DOCUMENT = 128
_MAX_ELEMENTS = 2**31


def exceeds_int32(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout) -> bool:
    """Tell whether FlashAttention 2's gradients would be wrong for so large a batch, without an error."""
    if not query.requires_grad:
        return False
    width = max(query.shape[-1], value.shape[-1])
    rounded = 256 if width > 192 else -(-width // 32) * 32
    # Sizes of tensors, because a graph would be made anew for other lengths.
    tokens = key.shape[0] if layout.key_gather is None else layout.key_gather.index.shape[0]
    padded = tokens + _PADDED_TOKENS_PER_DOCUMENT * (layout.keys.cu_seqlens.shape[0] - 1)
    return bool(padded * query.shape[1] * rounded >= _MAX_ELEMENTS)
