"""What every attention backend looks like, and those there are, in order of preference.

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
    """One way to compute causal attention inside each document of a `PackedLayout`."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def summary(self) -> str:
        """What it is and where it runs, in one line."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Which calls its kernels serve."""
        ...

    def refusals(self, request: AttentionRequest) -> list[str]:
        """Every reason why this backend cannot serve the request: what its capabilities rule out, and what is not
        installed; empty if it can."""
        ...

    def is_traceable(self, device: torch.device) -> bool:
        """Whether `torch.compile` takes its kernels for this device into a graph; others are one opaque op there."""
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
        """Causal attention inside each document: `query` `(T, N, H)`, `key` and `value` `(T, K, H)`.

        With `keys`, where the keys and values `(M, K, H)` of each document are, its queries are those of its last
        tokens: document i of `layout` attends to document i of `keys`. Backends whose capabilities say `keys_apart`
        take them.

        Returns `(T, N, H)` in the query's dtype.
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
    """The backend of that name.

    Raises:
        [`NoBackend`]: if there is none.
    """
    if name not in _BY_NAME:
        raise NoBackend(
            f"there is no attention backend '{name}'.",
            do=f"Choose 'auto' or one of {', '.join(map(repr, _BY_NAME))}.",
        )
    return _BY_NAME[name]


def refusals(request: AttentionRequest) -> dict[str, list[str]]:
    """For each backend by name, every reason why it cannot serve the request."""
    return {backend.name: backend.refusals(request) for backend in BACKENDS}
