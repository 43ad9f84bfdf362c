"""A trainer whose loss sees one rank for a while: where ranks hold other numbers of pairs, nothing can be gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Alone:
    """An `Accelerator` that gathers what it is given from this rank only; all else is its own."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def gather(self, tensor: Any) -> Any:
        """As of one rank."""
        return tensor

    def gather_for_metrics(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As of one rank."""
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """For the length of a `with` block `trainer.accelerator` gathers nothing."""
    own = trainer.accelerator
    trainer.accelerator = _Alone(own)
    try:
        yield
    finally:
        trainer.accelerator = own
