"""Packed attention inside compiled graphs: one graph for a whole backbone and for every set of documents.

FlashAttention's kernels are operators. They accept the boundaries as a tensor and the longest length as an integer
that may change. The other backends run code that depends on the documents, so a graph calls them as one opaque
operator. That operator saves its inputs only, and its backward computes the attention again.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim, S documents.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..autocast import cast_to_autocast_dtype
from ..compile import outside_of_graphs
from ..layout import AttentionLayout, PackedLayout
from .backends import get_backend
from .base import AttentionArguments, AttentionCall
from .capabilities import AttentionBackend


class _TracedLayout(NamedTuple):
    """The part of a layout that FlashAttention's kernels read, with integers that may change between batches."""

    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_tokens: int
    num_documents: int


def attend_in_graph(
    backend: AttentionBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    *,
    is_traceable: bool,
) -> torch.Tensor:
    """Compute a backend's attention while a graph is traced, see [`AttentionBackend`].

    Attention with a bias or dropout runs outside of the graph. Kernels that are not traceable are one operator in the
    graph, which supports neither keys with segments of their own nor attention in both directions.
    """
    layout = call.layout
    if call.bias is not None or call.dropout or not (layout.causal or is_traceable):
        return _outside(backend, query, key, value, call)
    if is_traceable:
        queries = _traced(layout.queries, query)
        keys = _traced(layout.keys, key) if layout.has_own_keys else queries
        return backend(query, key, value, call.on(AttentionLayout(queries, keys, layout.causal)))
    return torch.ops.trl_packfa.attend(
        *cast_to_autocast_dtype(query, key, value),
        call.sinks,
        layout.queries.sizes[0],
        backend.name,
        call.scaling,
        call.sliding_window,
        call.softcap,
    )


def _traced(layout: PackedLayout, tokens: torch.Tensor) -> Any:
    offsets, longest = layout.sizes
    return _TracedLayout(layout.cu_seqlens, longest.shape[0] - 1, tokens.shape[0], offsets.shape[0] - 1)


@outside_of_graphs
def _outside(backend: AttentionBackend, *call: Any) -> torch.Tensor:
    return backend(*call)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_OPTIONS = "Tensor offsets, str backend, float scaling, int? sliding_window, float? softcap"
_NUM_OPTIONS = 5
# The operators are defined by `torch.library.define`, because functions of `custom_op` cannot use autograd.
torch.library.define("trl_packfa::attend", f"({_INPUTS}, {_OPTIONS}) -> Tensor")
torch.library.define(
    "trl_packfa::attend_backward", f"(Tensor grad, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl("trl_packfa::attend", "default")
@torch.no_grad()
def _attend(*inputs: Any) -> torch.Tensor:
    """Compute attention `(T, N, H)` from query `(T, N, H)`, key and value `(T, K, H)` and sinks `(N,)`."""
    return _run(*inputs).contiguous()


@torch.library.impl("trl_packfa::attend_backward", "default")
def _attend_backward(grad: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the four tensors. Without sinks, the fourth has no elements."""
    tensors: list[Any] = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs[:4]]
    given = [tensor for tensor in tensors if tensor is not None]
    with torch.enable_grad():
        out = _run(*tensors, *inputs[4:])
    grads = [by.contiguous() for by in torch.autograd.grad(out, given, grad)]
    return *grads, *[grad.new_empty(0)] * (4 - len(given))


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    offsets: torch.Tensor,
    backend: str,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    arguments = AttentionArguments(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    layout = _layout(tuple(offsets.diff().tolist()), query.device)
    with torch.autocast(query.device.type, enabled=False):  # the inputs already have autocast's dtype
        return get_backend(backend)(query, key, value, arguments.on(layout.attention))


@lru_cache(maxsize=4)  # the layers of a batch share the layout and what kernels derive from it
def _layout(lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    return PackedLayout.from_lengths(lengths, device=device)


@torch.library.register_fake("trl_packfa::attend")
def _attend_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], value.shape[2]))


@torch.library.register_fake("trl_packfa::attend_backward")
def _attend_backward_fake(grad: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    *qkv, sinks = inputs[:4]
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv)
    return *grads, grad.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.backend, ctx.scaling, ctx.sliding_window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    options = (ctx.backend, ctx.scaling, ctx.sliding_window, ctx.softcap)
    *grads, by_sinks = torch.ops.trl_packfa.attend_backward(grad, *tensors, *options)
    return *grads, None if tensors[3] is None else by_sinks, *(None,) * _NUM_OPTIONS


torch.library.register_autograd("trl_packfa::attend", _differentiate, setup_context=_save_inputs)
