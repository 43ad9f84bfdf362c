"""The interface of attention backends, and the list of all backends in order of preference.

Shape letters: T packed tokens, M keys of all segments, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..errors import NoBackend
from .base import AttentionCall, AttentionRequest
from .capabilities import Capabilities
from .flash import FlashBackend
from .flex import FlexBackend
from .reference import ReferenceBackend
from .sdpa import SdpaBackend
from .varlen import VarlenBackend


class AttentionBackend(Protocol):
    """An implementation of attention inside each segment of an `AttentionLayout`."""

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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Compute attention inside each segment of `call.layout`.

        Shapes are `query` `(T, N, H)`, `key` and `value` `(M, K, H)`. M is T, unless documents share a prefix or
        tokens of a block see each other.

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
