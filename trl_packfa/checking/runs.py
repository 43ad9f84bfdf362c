"""The places of documents in a batch, and the result of each of them in one run.

Shape letters: B rows, L row length, n tokens of a document, k scored positions, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..layout import PackedLayout
from .documents import Documents
from .scoring import Scorer

Rows: TypeAlias = tuple[tuple[int, ...], ...]


class Key(NamedTuple):
    """Name of a traced tensor."""

    # `entered`: input of a layer or router; `left`: output of a token mixer; `routed`: of a router, by itself
    kind: str
    module: str
    call: int  # number of the module's call in this forward
    tensor: int = 0


Trace: TypeAlias = "dict[Key, torch.Tensor]"


class Result(NamedTuple):
    """Result of one document in one run."""

    states: torch.Tensor  # the LM head's input `(n, D)`; without such a head the model's result, `(n, V)` or `(1, V)`
    logits: torch.Tensor | None = None  # `(k, V)` of the scored positions, if there are any
    gradient: torch.Tensor | None = None  # of the embeddings, `(n, D)`, if it was taken
    trace: Trace = {}

    def detached(self) -> Result:
        """Return states and logits without their graph."""
        return Result(self.states.detach(), None if self.logits is None else self.logits.detach())

    @property
    def tensors(self) -> Documents:
        """Logits, if there are any, and states."""
        return [self.states] if self.logits is None else [self.logits, self.states]


# The results of one run by the number of the document.
Run: TypeAlias = dict[int, Result]


def dtype_of(run: Run) -> torch.dtype:
    """Return the dtype of the logits, or of the LM head's input if there are no logits."""
    first = next(iter(run.values()))
    return next((own.logits for own in run.values() if own.logits is not None), first.states).dtype


def random_losses(run: Run, seed: int, *, head: bool = False) -> list[torch.Tensor]:
    """Return a fixed random weighting of the states of each document, and with `head` of its logits."""
    terms = []
    for document, own in run.items():
        # Each document has its own seed, so it gets the same weights alone, packed, and among others.
        generator = torch.Generator().manual_seed(seed + 1 + document)
        for values in (own.states, own.logits if head else None):
            if values is None or not values.requires_grad:
                continue
            by_feature = torch.randn(values.shape[-1], generator=generator) / values.shape[-1] ** 0.5
            # Each token gets its own weight: a sum of equal terms stops growing in half precision. A few scored
            # positions get the weight of all tokens.
            by_token = torch.randn(len(values), generator=generator) * (len(own.states) / len(values))
            terms.append(by_token.to(values.device) @ (values.float() @ by_feature.to(values.device)))
    return terms


def take_gradients(losses: Sequence[torch.Tensor], scale: float) -> None:
    """Add `scale` times the gradients of the sum of some losses; as the Trainer's backward, without autocast."""
    if losses:
        with torch.autocast(losses[0].device.type, enabled=False):
            (scale * torch.stack(list(losses)).sum()).backward()


class Arrangement:
    """The places of each document's tokens in a batch.

    Args:
        places (`Mapping[int, torch.Tensor]`):
            For the number of each document those of its tokens among the `B * L`.
        shape (`tuple[int, int]`), layout ([`PackedLayout`], *optional*):
            Shape of the batch, `(B, L)`, and the layout of a packed batch.

    Attributes:
        documents (`tuple[int, ...]`): the numbers of the documents, ascending.
    """

    def __init__(
        self, places: Mapping[int, torch.Tensor], shape: tuple[int, int], layout: PackedLayout | None = None
    ) -> None:
        self.documents = tuple(sorted(places))
        self.places = {document: places[document] for document in self.documents}
        self.shape, self.layout = shape, layout

    @classmethod
    def of_one(cls, document: int, length: int) -> Arrangement:
        """Arrange one document of this length by itself."""
        return cls({document: torch.arange(length)}, (1, length))

    @classmethod
    def of_layout(cls, layout: PackedLayout, order: Sequence[int | None]) -> Arrangement:
        """Arrange documents as in a layout; `order` is the number of each of its documents, `None` for padding."""
        numbered = zip(order, layout.split(torch.arange(layout.num_tokens)), strict=True)
        places = {document: numbers for document, numbers in numbered if document is not None}
        return cls(places, (layout.rows, layout.row_length), layout)

    @classmethod
    def of_rows(cls, lengths: Sequence[int], rows: Rows, device: torch.device) -> Arrangement:
        """Arrange the documents in several rows of equal length, padded by documents that are no longer than these."""
        # Lengths (11, 24, 150) in rows ((0, 2), (1,)) give rows of 161 tokens: packed [11, 150, 24, 137], order
        # [0, 2, 1, None]. A model with a table of positions has no positions for a longer padding.
        longest, most = max(sum(lengths[i] for i in row) for row in rows), max(lengths)
        packed: list[int] = []
        order: list[int | None] = []
        for row in rows:
            whole, rest = divmod(longest - sum(lengths[i] for i in row), most)
            padding = [most] * whole + ([rest] if rest else [])
            packed += [*(lengths[i] for i in row), *padding]
            order += [*row, *(None for _ in padding)]
        return cls.of_layout(PackedLayout.from_lengths(packed, rows=len(rows), device=device), order)

    def split(self, tensor: torch.Tensor) -> Documents:
        """Return each document's part `(n, ...)` of a tensor `(B, L, ...)`."""
        flat = tensor.flatten(0, 1)
        return [flat[place] for place in self.places.values()]

    def run(self, score: Scorer, call: dict[str, Any], scored: Documents) -> Run:
        """Run a call of these documents, and score these of each one's places."""
        states, logits = score(call, self.shape, torch.cat(scored))
        if logits is None:  # a sequence classifier has one output for each row
            return dict(zip(self.documents, map(Result, states.split(1)), strict=True))
        by_document = [own if len(own) else None for own in logits.split([len(own) for own in scored])]
        return dict(zip(self.documents, map(Result, self.split(states), by_document), strict=True))

    def with_gradients(self, run: Run, embedded: Sequence[torch.Tensor], sign: float = 1.0) -> Run:
        """Return a run with each document's part of the gradient of the embeddings, times `sign`."""
        # A backbone that runs document by document embeds each group in its own call.
        if len(embedded) != 1 or embedded[0].shape[:2] != self.shape or embedded[0].grad is None:
            return run
        gradients = dict(zip(self.documents, self.split(embedded[0].grad), strict=True))
        return {i: own._replace(gradient=sign * gradients[i]) for i, own in run.items()}
