"""What a model asks of an attention backend, and what every backend looks like.

Shape letters: T packed tokens, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..layout import PackedLayout


class AttentionRequest(NamedTuple):
    """Everything that decides whether a backend can serve a call; hashable, so that it is resolved once.

    `sliding_window` counts the keys a query may see, itself included (transformers' meaning).
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

    def describe(self) -> str:
        """The request in one line, as error messages show it."""
        parts = [f"device={self.device}", f"dtype={str(self.dtype).removeprefix('torch.')}"]
        parts += [f"head_dim={self.head_dim}", f"heads={self.num_heads}/{self.num_key_value_heads}"]
        optional = {"window": self.sliding_window, "softcap": self.softcap, "dropout": self.dropout or None}
        parts += [f"{name}={value}" for name, value in optional.items() if value is not None]
        return " ".join(parts + ["sinks"] * self.sinks)


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

    def refusals(self, request: AttentionRequest) -> list[str]:
        """Every reason why this backend cannot serve the request; empty if it can."""
        ...

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attend: `query` `(T, N, H)`, `key` and `value` `(T, K, H)`, `sinks` `(N,)`; returns `(T, N, H)`."""
        ...
