"""Reasons why several processes cannot share a row of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..errors import UnsupportedModel
from ..patches.base import Patch


def needs_whole_documents(patch: Patch, mixers: Iterable[nn.Module], *, has_invocations: bool) -> str | None:
    """Return why a model needs the tokens of whole documents outside of its attention, `None` if it does not.

    Args:
        patch ([`Patch`]):
            The patch of its architecture.
        mixers (`Iterable[torch.nn.Module]`):
            Its modules that run document by document.
        has_invocations (`bool`):
            Whether an adapter is activated by tokens.
    """
    if patch.rebatch:
        return "the backbone runs document by document"
    if names := sorted({type(module).__name__ for module in mixers}):
        return f"documents run one by one in {', '.join(names)}"
    return "activated LoRA begins at the last invocation of a document" if has_invocations else None


def shard_refusal(patch: Patch, mixers: Iterable[nn.Module], *, has_invocations: bool) -> str | None:
    """Return why processes cannot share a row of a model, `None` if they can; see [`needs_whole_documents`]."""
    if patch.bias is not None:
        return "its attention adds a bias to the scores, which is computed from the whole row"
    return needs_whole_documents(patch, mixers, has_invocations=has_invocations)


def refuse_shards(module: nn.Module, size: int, refusal: str) -> UnsupportedModel:
    """Return the error about a model whose rows cannot be shared by `size` processes, with the reason."""
    return UnsupportedModel(
        f"{type(module).__name__} cannot run rows that {size} processes share.",
        why=[f"{refusal}, and each process holds only a part of the row's tokens"],
        do="Train this model with sequence_parallel=1, and shard its weights if they are too large (fsdp=True).",
    )
