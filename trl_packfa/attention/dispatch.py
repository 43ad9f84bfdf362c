"""The choice of an attention backend for a request."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ..compile import constant_in_graphs, outside_of_graphs
from ..errors import NoBackend, PackingError
from ..layout import PackedLayout
from .backends import BACKENDS, get_backend
from .base import AttentionArguments, AttentionCall, AttentionRequest, exceeds_int32
from .capabilities import AttentionBackend
from .custom_op import attend_in_graph
from .exchange import attend_sharded

QKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def resolve(request: AttentionRequest, backend: str = "auto") -> AttentionBackend:
    """Return the backend for a request: the named one, or for `"auto"` the first selectable one without refusals.

    Raise [`NoBackend`] with the request and every backend's reasons.
    """
    request = request._replace(named=backend != "auto")
    candidates = [get_backend(backend)] if request.named else [b for b in BACKENDS if b.capabilities.is_selectable]
    why = []
    for candidate in candidates:
        reasons = candidate.refusals(request)
        if not reasons:
            return candidate
        why += [f"{candidate.name}: {reason}" for reason in reasons]
    raise NoBackend(
        f"no attention backend can run this model (asked for: {backend}): {request.describe()}",
        why=why,
        do="Change the settings in these reasons, or pass backend='auto' (trainers: attention_backend='auto').",
    )


class BackendChoice:
    """The user's choice of a backend for one model. Each kind of request is resolved once and kept."""

    def __init__(self, name: str) -> None:
        if name != "auto":
            get_backend(name)
        self.name = name
        self.resolved: dict[AttentionRequest, str] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        arguments: AttentionArguments,
    ) -> torch.Tensor:
        """Compute packed attention with the backend that serves these tensors and arguments, see [`AttentionBackend`].

        A token attends to the earlier tokens of its document, also if the prefix is shared between documents. Tokens
        of a bidirectional span attend to the later tokens of their span, too. If several processes share the row, they
        exchange its tokens for heads. Raise [`NoBackend`] if no backend serves them. Raise [`PackingError`] if a span
        comes with a bias, or is longer than the sliding window; if a row cannot be shared by so many processes.
        """
        if layout.shard is not None:
            return attend_sharded(self.attend, query, key, value, layout, arguments)
        out = self._attend_causally((query, key, value), layout, arguments)
        if layout.bidirectional is None or layout.bidirectional_attention(arguments.sliding_window) is None:
            return out
        return self._attend_to_spans(out, (query, key, value), layout, arguments)

    # Outside of graphs, as the spans are those of this batch.
    @outside_of_graphs
    def _attend_to_spans(
        self, out: torch.Tensor, qkv: QKV, layout: PackedLayout, arguments: AttentionArguments
    ) -> torch.Tensor:
        """Return `out` with the attention of the spans' tokens in place of their causal attention."""
        if arguments.bias is not None:
            raise PackingError(
                "tokens of an image see each other, but this attention adds a term to its scores.",
                do="Patch the model with unpad=False, or train on text alone.",
            )
        found = layout.bidirectional_attention(arguments.sliding_window)
        assert found is not None
        tokens, attention = found
        call, (query, key, value) = arguments.on(attention), qkv
        query, key, value = tokens.gather(query), attention.gather_keys(key), attention.gather_keys(value)
        seen = self.for_call(query, key, value, call)(query, key, value, call)
        return out.index_copy(0, tokens.index, seen)

    def _attend_causally(self, qkv: QKV, layout: PackedLayout, arguments: AttentionArguments) -> torch.Tensor:
        call, (query, key, value) = arguments.on(layout.attention), qkv
        backend, in_graph = self.for_call(query, key, value, call), torch.compiler.is_compiling()
        is_traceable = in_graph and _is_traceable(backend.name, query.device)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
            if not in_graph:
                return backend(query, key, value, call)
            return attend_in_graph(backend, query, key, value, call, is_traceable=is_traceable)

        # A bias and the opaque operator support whole documents only, not segments of them.
        knows_segments = arguments.bias is None and (is_traceable or not in_graph)
        cost = backend.capabilities.cost_after_prefix
        if (gather := layout.sequence_gather) is None or (knows_segments and (not cost or layout.pairs_saved > cost)):
            return attend(query, call.layout.gather_keys(key), call.layout.gather_keys(value), call)
        query, key, value = (gather.gather(tensor) for tensor in (query, key, value))
        return gather.take_first(attend(query, key, value, arguments.on(layout.full_sequences.attention)))

    def for_call(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> AttentionBackend:
        """Return the backend that serves a call; raise [`NoBackend`] if none does."""
        request = AttentionRequest.of(query, key, value, call)
        backend = self.for_request(request)
        # Only of a backend with the limit, because a graph gets a guard on the sizes.
        if not backend.capabilities.any_size and exceeds_int32(query, key, value, call.layout):
            backend = self.for_request(request._replace(exceeds_int32=True))
        return backend

    def for_request(self, request: AttentionRequest) -> AttentionBackend:
        """Return the backend that serves the request; raise [`NoBackend`] if none does."""
        if torch.compiler.is_compiling():
            return get_backend(_name_in_graphs(self.name, *request))
        if request not in self.resolved:
            self.resolved[request] = resolve(request, self.name).name
        return get_backend(self.resolved[request])

    def describe(self) -> list[str]:
        """Return a line for each kind of request so far, with its backend and that backend's kernels."""
        kernels = {name: get_backend(name).kernels for name in self.resolved.values()}
        return [
            f"{name}{f' ({found})' if (found := kernels[name](request)) else ''} for {request.describe()}"
            for request, name in self.resolved.items()
        ]


@constant_in_graphs
def _name_in_graphs(backend: str, *request: Any) -> str:
    """Return the name of the backend for a request with these fields. A graph can pass constants only."""
    return resolve(AttentionRequest(*request), backend).name


@constant_in_graphs
def _is_traceable(backend: str, device: torch.device) -> bool:
    return get_backend(backend).is_traceable(device)
