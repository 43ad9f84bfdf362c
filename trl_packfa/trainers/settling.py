"""Settle a trainer's config before weights are read: packed if possible, else padded if nobody asked for packing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..api import patched
from ..config.requirements import require
from ..errors import PackingError
from .requirements.built import PATCHED
from .requirements.runs import SETUP
from .requirements.training import Training


def settle(
    run: Training, packed: Iterable[Callable[[], Any]], *, padded: Callable[[], Any] | None
) -> tuple[Training, PackingError | None]:
    """Return the run with the first config that meets the requirements, and the error that explains why it is padded.

    Args:
        run ([`Training`]):
            The run with the arguments of the user.
        packed (`Iterable[Callable]`):
            Functions that make the config of a packed run. The best one comes first.
        padded (`Callable`, *optional*):
            Makes the config of the padded run, which the table of requirements is held against last. `None` if the
            user asked for packing: then there is no fallback.

    Raises:
        [`PackingError`]: if the user asked for packing and it is not possible, or if the run cannot be trained at all.
    """
    refusal = None
    for make in packed:
        try:
            run = run.with_args(make())
            require(SETUP, run)
            if padded is not None:
                _require_patchable(run)
            return run, None
        except PackingError as error:
            if padded is None:
                raise
            refusal = refusal or error
    assert padded is not None, "otherwise the first config was returned or refused"
    run = run.with_args(padded())
    require(SETUP, run)
    return run, refusal


def _require_patchable(run: Training) -> None:
    """Refuse a model that was given as an object and cannot be patched for a run; it is left as it was.

    A model by name is known by its type alone, before it is loaded.
    """
    if isinstance(run.model, nn.Module):
        with patched(run.model, unpad=not run.packs_rows, **run.args.patch_options):
            require(PATCHED, run)
