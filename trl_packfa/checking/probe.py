"""A few documents and the ways to run them through a model: packed in one row or in several, and each alone.

Shape letters: B rows, L row length, S documents, V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device
from torch import nn

from ..errors import InvalidLayout
from ..layout.call_context import current_call, in_call
from ..layout.from_call import layout_of
from ..patching.inspect import inner_model, known_ids, known_labels
from .documents import Documents
from .following import Following
from .runs import Arrangement, Rows, Run, random_losses, take_gradients
from .scoring import Scorer
from .subject import Subject, device_of

Collator: TypeAlias = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def traced(subject: Subject, call: Callable[[], Run], following: Following, sign: float | None, seed: int) -> Run:
    """Run documents with traces; with `sign` add the gradients of [`random_losses`]."""
    # No graph is built if no gradients are taken: PEFT's activated LoRA allows one forward for each backward.
    with torch.set_grad_enabled(sign is not None), following.attached(subject.parts):
        run = call()
        if sign is not None and subject.trained:
            take_gradients(random_losses(run, seed, head=subject.whole), sign * subject.loss_scale)
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
        self.row = Arrangement.of_layout(layout, order)

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
            layout = arrangement.layout
            assert layout is not None
            ids = torch.zeros(layout.num_tokens, dtype=torch.long)
            for place, document in zip(arrangement.places.values(), tokens, strict=True):
                ids[place] = document
            batch = {
                "input_ids": ids.view(arrangement.shape),
                "position_ids": layout.position_ids(),
                "packed_layout": layout,
            }
        if without_boundaries:
            batch = {"input_ids": batch["input_ids"]}
        # With labels the model would compute a loss, which nobody reads.
        call: Any = send_to_device({name: own for name, own in batch.items() if name != "labels"}, self.device)
        return self._score_documents(call, arrangement)

    def alone(self, document: int) -> Run:
        """Run one document by itself."""
        ids = self.tokens[document][None].to(self.device)
        # A model that runs by name gets a mask, which may hold windows that its attention ignores.
        with in_call(replace(current_call(), masks_as_sdpa=True)):
            return self._score_documents({"input_ids": ids}, Arrangement.of_one(document, ids.shape[1]))

    def _score_documents(self, call: dict[str, Any], arrangement: Arrangement) -> Run:
        is_scored = self.scored.issuperset(arrangement.documents)
        places = arrangement.places.values()
        return arrangement.run(self._score, call, [own if is_scored else own[:0] for own in places])

    def run_packed(
        self,
        arrangement: Arrangement,
        sign: float | None,
        handed: Run,
        *,
        tokens: Documents | None = None,
        frozen: bool = False,
        free: bool = False,
    ) -> Run:
        """Run documents packed, with the inputs in `handed` for their layers; with `sign` add their gradients.

        If `frozen`, only the embeddings get gradients. If `free`, routers choose by themselves.
        """
        following = Following(arrangement, handed, free=free)
        with self.subject.frozen() if frozen else nullcontext():
            return self._run(lambda: self.packed(arrangement, tokens), sign, following)

    def run_alone(self, sign: float | None, handed: Run) -> Run:
        """Run every document by itself and add its gradients; the layers get their own inputs."""
        found: Run = {}
        for document, length in enumerate(self.lengths):
            following = Following(Arrangement.of_one(document, length), {})
            found |= self._run(partial(self.alone, document), sign, following)
            self.subject.note_gain()
        return found

    def _run(self, call: Callable[[], Run], sign: float | None, following: Following) -> Run:
        with nullcontext([]) if self.subject.whole or sign is None else self.embedded() as embedded:
            run = traced(self.subject, call, following, sign, self.seed)
        return following.arrangement.with_gradients(run, embedded, sign or 1.0)

    def wrong_labels(self) -> float:
        """Return the share of the collator's labels that are not the document's own next token."""
        # The places leave out a collator's padding. After a document's last token comes the first label of the next
        # document, which is -100.
        labels = self.collator(_examples(self.tokens))["labels"].flatten()[torch.cat([*self.row.places.values()])]
        own = torch.cat([nn.functional.pad(ids[1:], (0, 1), value=-100) for ids in self.tokens])
        return float((labels[1:] != own[:-1]).float().mean())

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
