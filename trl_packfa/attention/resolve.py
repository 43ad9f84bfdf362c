"""Which backend serves a request, and why the ones before it do not."""

from __future__ import annotations

import torch

from ..errors import NoBackend
from ..graphs import outside_of_graphs
from ..layout import PackedLayout
from .flash import FlashBackend
from .flex import FlexBackend
from .reference import ReferenceBackend
from .request import AttentionArguments, AttentionBackend, AttentionRequest
from .sdpa import SdpaBackend
from .varlen import VarlenBackend

# In order of preference.
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


def resolve(request: AttentionRequest, backend: str = "auto") -> AttentionBackend:
    """The backend for a request: the first without refusals, or the named one.

    `"auto"` never falls to `reference`. A backend named by the user runs or raises.

    Raises:
        [`NoBackend`]: with the request and every backend's reasons.
    """
    candidates = [get_backend(backend)] if backend != "auto" else [b for b in BACKENDS if b.name != "reference"]
    why = []
    for candidate in candidates:
        reasons = candidate.refusals(request)
        if not reasons:
            return candidate
        why += [f"{candidate.name}: {reason}" for reason in reasons]
    raise NoBackend(
        f"no attention backend can run this model (asked for: {backend}): {request.describe()}",
        why=why,
        do="Change what the reasons name, or pass attention_backend='auto'.",
    )


class BackendChoice:
    """The user's choice for one model, resolved once per kind of request and remembered."""

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
        """Packed attention by the backend that serves these tensors and arguments; see [`AttentionBackend`].

        Raises:
            [`NoBackend`]: if none does.
        """
        backend = self.for_request(AttentionRequest.of(query, key, arguments))
        return backend(query, key, value, layout, arguments)

    def for_request(self, request: AttentionRequest) -> AttentionBackend:
        """The backend that serves the request.

        Raises:
            [`NoBackend`]: if none does.
        """
        if request not in self.resolved:
            self.resolved[request] = _resolved_name(request, self.name)
        return _BY_NAME[self.resolved[request]]


# Looks at packages and devices: once, and nothing to compile.
@outside_of_graphs
def _resolved_name(request: AttentionRequest, backend: str) -> str:
    return resolve(request, backend).name
