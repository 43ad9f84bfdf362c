"""A few documents and the ways to run them through a model: packed in one row or in several, and each alone.

Shape letters: B rows, L row length, S documents, V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device
from torch import nn

from ..errors import InvalidLayout
from ..layout import PackedLayout
from ..layout.call_context import current_call, in_call
from ..layout.from_call import layout_of
from ..patching.inspect import inner_model, known_ids, known_labels
from .documents import Documents
from .following import Following, Result, Run
from .scoring import Scorer
from .subject import Subject, device_of

Collator: TypeAlias = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
Rows: TypeAlias = tuple[tuple[int, ...], ...]


def dtype_of(run: Run) -> torch.dtype:
    """Return the dtype of the logits, or of the LM head's input if there are no logits."""
    logits = [own.logits for own in run.values() if own.logits is not None]
    return (logits or [own.output for own in run.values()])[0].dtype


def take_gradients(losses: Sequence[torch.Tensor], scale: float) -> None:
    """Add `scale` times the gradients of the sum of some losses; as the Trainer's backward, without autocast."""
    if losses:
        with torch.autocast(losses[0].device.type, enabled=False):
            (scale * torch.stack(list(losses)).sum()).backward()


def traced(
    subject: Subject,
    call: Callable[[], Run],
    following: Following,
    sign: float | None,
    losses: Callable[[Run], Sequence[torch.Tensor]],
) -> Run:
    """Run documents with traces; with `sign` add the gradients of their `losses`."""
    # No graph is built if no gradients are taken: PEFT's activated LoRA allows one forward for each backward.
    with torch.set_grad_enabled(sign is not None), following.attached(subject.parts):
        run = call()
        if sign is not None and subject.trained:
            take_gradients(losses(run), sign * subject.loss_scale)
    return {i: own.detached()._replace(trace=following.traces[i]) for i, own in run.items()}


class Probe:
    """A few documents, a replacement for each, and the ways to run them through a model.

    The `collator` makes the batch of `row`, in which all documents are packed. `tokens` and `others` are the ids
    `(n,)` of each document and of its replacement, and `seed` is for the random weights of a loss. The LM head, which
    takes most of the time if the vocabulary is large, runs on every position of the documents in `scored` (of all by
    default), alone and in arrangements of these only; in others it runs on none. Raise [`InvalidLayout`] if the
    collator's batch has no boundaries.
    """

    def __init__(
        self,
        subject: Subject,
        collator: Collator,
        tokens: Documents,
        others: Documents,
        seed: int,
        *,
        scored: Iterable[int] | None = None,
    ) -> None:
        self.subject, self.model = subject, subject.model
        self.collator, self.seed = collator, seed
        self.scored = frozenset(range(len(tokens)) if scored is None else scored)
        self.device, self._score = device_of(self.model), Scorer(self.model)
        self.tokens, self.others = tokens, others
        self.lengths = tuple(map(len, tokens))
        # The collator may add padding, which is one more document.
        layout = layout_of(collator(_examples(tokens)))
        if layout is None:
            raise InvalidLayout(
                f"{type(collator).__name__} packs {len(tokens)} documents into a batch without boundaries.",
                do="Let it send position_ids that restart, cu_seq_lens_q or packed_layout, and no padding mask.",
            )
        order = [i if i < len(tokens) else None for i in range(layout.num_documents)]
        self.row = Arrangement(layout, order)

    def arranged(self, rows: Rows) -> Arrangement:
        """Arrange these documents in rows; shorter rows end in padding."""
        return Arrangement.of_rows(self.lengths, rows, self.device)

    def replaced(self, documents: Sequence[int], which: Sequence[bool]) -> Documents:
        """Return the tokens of these documents, some of them replaced."""
        pairs = ((self.tokens[i], self.others[i]) for i in documents)
        return [b if other else a for (a, b), other in zip(pairs, which, strict=True)]

    def packed(
        self, arrangement: Arrangement, tokens: Documents | None = None, *, without_boundaries: bool = False
    ) -> Run:
        """Run the arrangement's documents, or `tokens` in their places."""
        tokens = [self.tokens[i] for i in arrangement.documents] if tokens is None else tokens
        if arrangement is self.row:
            batch = self.collator(_examples(tokens))
        else:
            # The collator makes only one row, so this batch is made here.
            ids = torch.zeros(arrangement.layout.num_tokens, dtype=torch.long)
            for place, document in zip(arrangement.places.values(), tokens, strict=True):
                ids[place] = document
            layout = arrangement.layout
            batch = {
                "input_ids": ids.view(arrangement.shape),
                "position_ids": layout.position_ids(),
                "packed_layout": layout,
            }
        if without_boundaries:
            batch = {"input_ids": batch["input_ids"]}
        scored = [self._scored(arrangement.documents, len(ids)) for ids in tokens]
        places = torch.cat([place[own] for place, own in zip(arrangement.places.values(), scored, strict=True)])
        found = self._score(self._call_of(batch), arrangement.shape, places)
        logits = [own if len(own) else None for own in found.logits.split([len(own) for own in scored])]
        results = map(Result, arrangement.split(found.states), logits)
        return dict(zip(arrangement.documents, results, strict=True))

    def _call_of(self, batch: dict[str, Any]) -> Any:
        # With labels the model would compute a loss, which nobody reads.
        return send_to_device({name: value for name, value in batch.items() if name != "labels"}, self.device)

    def alone(self, document: int) -> Run:
        """Run one document by itself."""
        ids = self.tokens[document][None].to(self.device)
        # A model that runs by name gets a mask, which may hold windows that its attention ignores.
        with in_call(replace(current_call(), masks_as_sdpa=True)):
            found = self._score({"input_ids": ids}, (1, ids.shape[1]), self._scored((document,), ids.shape[1]))
        return {document: Result(found.states[0], found.logits if len(found.logits) else None)}

    def _scored(self, documents: Sequence[int], length: int) -> torch.Tensor:
        """Return the positions that are scored of a document of this length, in an arrangement of `documents`."""
        return torch.arange(length if self.scored.issuperset(documents) else 0)

    def losses(self, run: Run, *, head: bool = False) -> list[torch.Tensor]:
        """Return a fixed random weighting of the states of each document, and with `head` of the logits."""
        terms = []
        for document, own in run.items():
            # Each document has its own seed, so it gets the same weights alone, packed, and among others.
            generator = torch.Generator().manual_seed(self.seed + 1 + document)
            for values in (own.states, own.logits if head else None):
                if values is None or not values.requires_grad:
                    continue
                by_feature = torch.randn(values.shape[-1], generator=generator) / values.shape[-1] ** 0.5
                # Each token gets its own weight: a sum of equal terms stops growing in half precision.
                by_token = torch.randn(len(values), generator=generator)
                terms.append(by_token.to(values.device) @ (values.float() @ by_feature.to(values.device)))
        return terms

    @torch.no_grad()
    def loss_difference(self) -> float:
        """Return the difference between the mean losses under the collator's labels and under each own next token."""
        batch = self.collator(_examples(self.tokens))
        # The places leave out a collator's padding. After a document's last token comes the first label of the next
        # document, which is -100.
        labels = batch["labels"].flatten()[torch.cat([*self.row.places.values()])][1:]
        own = torch.cat([nn.functional.pad(ids[1:], (0, 1), value=-100) for ids in self.tokens])[:-1]
        if torch.equal(labels, own):
            return 0.0
        outputs = self.model(**self._call_of(batch), use_cache=False)
        logits = torch.cat(self.row.split(outputs.logits)).float()[:-1]
        return abs(_mean_loss(logits, labels.to(self.device)) - _mean_loss(logits, own.to(self.device)))

    @contextmanager
    def embedded(self) -> Iterator[list[torch.Tensor]]:
        """Collect the outputs of the input embeddings in a `with` block, as leaves with gradients.

        The embeddings themselves get no gradient.
        """
        outputs: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            # A new leaf, so the backward stops here. A clone is returned, as models add to the embeddings in place.
            outputs.append(output.detach().requires_grad_(True))
            return outputs[-1].clone()

        with self.model.get_input_embeddings().register_forward_hook(hook):  # type: ignore[operator, union-attr]
            yield outputs

    def outputs_in(self, arrangement: Arrangement, run: Callable[[], object]) -> dict[str, Documents]:
        """Return every module's per-token output in a run, by document, in the order in which modules finish."""
        seen: dict[str, Documents] = {}

        def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            is_per_token = isinstance(output, torch.Tensor) and output.shape[:2] == arrangement.shape
            if is_per_token and output.is_floating_point():
                seen[name] = arrangement.split(output.detach())

        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(watch, name)))
            run()
        return seen


class Arrangement:
    """The places of each document's tokens in a batch.

    Args:
        layout ([`PackedLayout`]), order (`Sequence[int | None]`):
            The layout of the batch, and the number of the document in each of its places, `None` for padding.

    Attributes:
        documents (`tuple[int, ...]`): the numbers of the documents, ascending.
        places (`dict[int, torch.Tensor]`): for each of them the numbers of its tokens among the `B * L`.
    """

    def __init__(self, layout: PackedLayout, order: Sequence[int | None]) -> None:
        self.layout = layout
        numbered = zip(order, layout.split(torch.arange(layout.num_tokens)), strict=True)
        places = {document: numbers for document, numbers in numbered if document is not None}
        self.documents = tuple(sorted(places))
        self.places = {document: places[document] for document in self.documents}

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
        return cls(PackedLayout.from_lengths(packed, rows=len(rows), device=device), order)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the batch, `(B, L)`."""
        return self.layout.rows, self.layout.row_length

    def split(self, tensor: torch.Tensor) -> Documents:
        """Return each document's part `(n, ...)` of a tensor `(B, L, ...)`."""
        flat = tensor.flatten(0, 1)
        return [flat[place] for place in self.places.values()]

    def with_gradients(self, run: Run, embedded: Sequence[torch.Tensor], sign: float = 1.0) -> Run:
        """Return a run with each document's part of the gradient of the embeddings, times `sign`."""
        # A backbone that runs document by document embeds each group in its own call.
        if len(embedded) != 1 or embedded[0].shape[:2] != self.shape or embedded[0].grad is None:
            return run
        gradients = dict(zip(self.documents, self.split(embedded[0].grad), strict=True))
        return {i: own._replace(gradient=sign * gradients[i]) for i, own in run.items()}


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens that the model can both read and predict."""
    return min(size for size in (known_ids(model), known_labels(model)) if size > 1)


def special_tokens(model: Any, vocabulary: int) -> list[int]:
    """Return ids that code may treat in another way: 0, and those that begin and end texts."""
    config = inner_model(model).config.get_text_config()
    named = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    ids = {0, *(i for own in named for i in (own if isinstance(own, list) else [own]) if isinstance(i, int))}
    # XLM and Flaubert count a document's tokens by this id, if a call has no mask: alone it would have fewer.
    counts_pads = getattr(config, "pad_index", None)
    return sorted(i for i in ids if 0 <= i < vocabulary and i != counts_pads)


def _examples(documents: Documents) -> list[dict[str, Any]]:
    return [{"input_ids": ids.tolist()} for ids in documents]


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean loss, summed in float64, so that another order of the same losses gives the same mean."""
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    # On the host, as Apple's devices have no float64.
    return float(losses[labels != -100].cpu().double().mean())
