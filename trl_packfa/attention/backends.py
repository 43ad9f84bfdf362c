"""The interface of attention backends, and the list of all backends in order of preference.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..errors import NoBackend
from ..layout import PackedLayout
from .base import AttentionArguments, AttentionRequest
from .capabilities import Capabilities
from .flash import FlashBackend
from .flex import FlexBackend
from .reference import ReferenceBackend
from .sdpa import SdpaBackend
from .varlen import VarlenBackend


class AttentionBackend(Protocol):
    """An implementation of causal attention inside each document of a `PackedLayout`."""

    @property
    def name(self) -> str:
        """Name that users pass to `backend=`."""
        ...

    @property
    def summary(self) -> str:
        """One line that says how the backend computes attention and on which devices."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Calls that the backend's kernels support."""
        ...

    def refusals(self, request: AttentionRequest) -> list[str]:
        """List every reason why this backend cannot serve the request; empty if it can.

        Reasons are limits of its capabilities and packages that are not installed.
        """
        ...

    def is_traceable(self, device: torch.device) -> bool:
        """Tell whether `torch.compile` can put the kernels for this device into a graph.

        Other kernels become one opaque operator in the graph.
        """
        ...

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        arguments: AttentionArguments,
        keys: PackedLayout | None = None,
    ) -> torch.Tensor:
        """Compute causal attention inside each document: `query` `(T, N, H)`, `key` and `value` `(T, K, H)`.

        `keys` is a second layout, for documents with more keys than queries: `key` and `value` then have shape
        `(M, K, H)`, and document i of `layout` attends to document i of `keys`. The queries belong to the last tokens
        of the document. Only backends with the capability `keys_apart` accept it.

        Return `(T, N, H)` in the query's dtype.
        """
        ...


BACKENDS: tuple[AttentionBackend, ...] = (
    FlashBackend(),
    VarlenBackend(),
    FlexBackend(),
    SdpaBackend(),
    ReferenceBackend(),
)
_BY_NAME = {backend.name: backend for backend in BACKENDS}


def get_backend(name: str) -> AttentionBackend:
    """Return the backend with this name.

    Raises:
        [`NoBackend`]: if there is no such backend.
    """
    if name not in _BY_NAME:
        raise NoBackend(
            f"there is no attention backend '{name}'.",
            do=f"Choose 'auto' or one of {', '.join(map(repr, _BY_NAME))}.",
        )
    return _BY_NAME[name]


def refusals(request: AttentionRequest) -> dict[str, list[str]]:
    """List, by backend name, every reason why a backend cannot serve the request."""
    return {backend.name: backend.refusals(request) for backend in BACKENDS}
