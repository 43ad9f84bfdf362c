"""The attention backends, in order of preference."""

from __future__ import annotations

from ..errors import NoBackend
from .base import AttentionRequest
from .capabilities import AttentionBackend
from .flash import FlashBackend
from .flex import FlexBackend
from .reference import ReferenceBackend
from .sdpa import SdpaBackend
from .varlen import VarlenBackend

BACKENDS: tuple[AttentionBackend, ...] = (
    FlashBackend(),
    VarlenBackend(),
    FlexBackend(),
    SdpaBackend(),
    ReferenceBackend(),
)
_BY_NAME = {backend.name: backend for backend in BACKENDS}


def get_backend(name: str) -> AttentionBackend:
    """Return the backend with this name; raise [`NoBackend`] if there is none."""
    if name not in _BY_NAME:
        raise NoBackend(
            f"there is no attention backend '{name}'.",
            do=f"Choose 'auto' or one of {', '.join(map(repr, _BY_NAME))}.",
        )
    return _BY_NAME[name]


def refusals(request: AttentionRequest) -> dict[str, list[str]]:
    """List, by backend name, every reason why a backend cannot serve the request."""
    return {backend.name: backend.refusals(request) for backend in BACKENDS}
