"""`alone`: make a trainer's accelerator gather from this rank only, for ranks with different numbers of pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Alone:
    """A wrapper of an `Accelerator` that gathers from this rank only. All else is the wrapped accelerator's."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def gather(self, tensor: Any) -> Any:
        """Return the tensor as it is, like a run with one rank."""
        return tensor

    def gather_for_metrics(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor as it is, like a run with one rank."""
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Let `trainer.accelerator` gather from this rank only inside a `with` block."""
    own = trainer.accelerator
    trainer.accelerator = _Alone(own)
    try:
        yield
    finally:
        trainer.accelerator = own
