"""Run a few padded rows in several ways: with their pads, without them, with shared prefixes, and each row alone.

Shape letters: B rows, L row length, T tokens of a row without pads, n tokens of a document, V vocabulary or labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import TRAIN_PADDED, PackingError, UnsupportedModel, first_line, is_out_of_memory
from ..layout.padded_rows import PaddedRows, rows_of_lengths
from ..layout.shared_rows import share
from ..override import set_inside
from ..patching.inspect import find_backbone, forward_takes, inner_model, max_positions
from .compare import relative_difference
from .documents import Documents
from .following import Following, Result, Run
from .probe import traced
from .scoring import Scorer, is_multiple_choice
from .subject import Subject, device_of

# Columns of pads that even the longest row has.
_EXTRA = 3
# Arguments that tell a model which tokens see each other in both directions, and types of a row's tokens to try: two
# images among text (Gemma 3), and a prefix whose tokens have the type 0 (PaliGemma).
_TYPES = ("token_type_ids", "mm_token_type_ids")
_PATTERNS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda place: ((place >= 3) & (place < 8)) | ((place >= 12) & (place < 20)),
    lambda place: place >= 5,
)


class PaddedProbe:
    """A few padded rows of these documents, and the ways to run them."""

    def __init__(self, subject: Subject, tokens: Documents, seed: int) -> None:
        self.subject, self.model, self.tokens, self.seed = subject, subject.model, tokens, seed
        state = subject.state
        assert state.unpadding is not None
        self.unpadding, self.device = state.unpadding, device_of(subject.model)
        inner = inner_model(self.model)
        most = max_positions(find_backbone(self.model, state.patch))
        pad = getattr(inner.config.get_text_config(), "pad_token_id", None)
        if pad is None and type(inner).__name__.endswith("ForSequenceClassification"):
            raise UnsupportedModel(
                f"{type(inner).__name__} has no pad_token_id, which it needs to find the last token of a padded row.",
                do="Set model.config.pad_token_id to the tokenizer's.",
            )
        self.pad = 0 if pad is None else int(pad)
        width = max(map(len, tokens)) + _EXTRA
        self.width = width if most is None else min(width, most)
        self.positions = forward_takes(inner, "position_ids") and not is_multiple_choice(inner)
        self.score = Scorer(self.model)
        names = [name for name in _TYPES if forward_takes(inner, name)]
        # Token types of each document by the argument's name.
        self.types: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():  # before any trace: the first call may run the model twice to find out how to score
            self._require_text(names)
            if state.parts.takes_images:
                self.types = self._types_with_blocks(names)

    def _require_text(self, names: list[str]) -> None:
        """Run one document before anything is measured, and keep the token types that the model needs for a text.

        Molmo 2 needs some in training, also without images. Raise [`UnsupportedModel`] if the model's code needs more.
        """
        first: Exception | None = None
        for name in (None, *names):
            self.types = {} if name is None else {name: [torch.zeros_like(own) for own in self.tokens]}
            try:
                with set_inside(self.unpadding, is_on=False):
                    self.score(self._call_of(0), (1, len(self.tokens[0])), torch.tensor([0]))
                return
            except Exception as error:  # the model's own code may raise anything
                if isinstance(error, PackingError) or is_out_of_memory(error):
                    raise
                first = first or error
        assert first is not None
        code, said = type(inner_model(self.model)).__name__, first_line(first).rstrip(".")
        raise UnsupportedModel(
            f"the code of {code} does not run a text by itself: {said}.",
            do=f"{TRAIN_PADDED[0].upper()}{TRAIN_PADDED[1:]}.",
        ) from first

    def run_once(self) -> None:
        """Run the padded rows as without a patch."""
        rows = self.rows(left=False)
        with set_inside(self.unpadding, is_on=False):
            self.score(self.batch(rows), rows.shape, torch.tensor([0]))

    def _types_with_blocks(self, names: list[str]) -> dict[str, list[torch.Tensor]]:
        """Return token types by which this model lets tokens see each other in both directions, else those of a text.

        They stand for images: the check has none, as each model takes pixels in its own form.
        """
        rows, before, of_text = self.rows(left=False), self.unpadding.blocks, self.types
        for name, pattern in itertools.product(names, _PATTERNS):
            self.types = {name: [pattern(torch.arange(len(ids))).long() for ids in self.tokens]}
            try:
                self.score(self.batch(rows), rows.shape, torch.tensor([0]))
            # The model's own code may need images with these types, and raise anything without them.
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue
            if self.unpadding.blocks > before:
                return self.types
        return of_text

    def rows(self, *, left: bool) -> PaddedRows:
        """Return the places of the documents, padded on the `left` or on the right."""
        return rows_of_lengths([len(ids) for ids in self.tokens], self.width, left=left)

    def _call_of(self, document: int) -> dict[str, Any]:
        own = {"input_ids": self.tokens[document], **{name: types[document] for name, types in self.types.items()}}
        return {name: value[None].to(self.device) for name, value in own.items()}

    def batch(self, rows: PaddedRows, *, masked: bool = True) -> dict[str, Any]:
        """Return the padded batch, as a collator makes it."""
        mask = rows.put_back(torch.ones(1, rows.num_tokens, dtype=torch.long))
        ids = rows.put_back(torch.cat(self.tokens)[None]).masked_fill(mask == 0, self.pad)
        made = {"input_ids": ids, "attention_mask": mask if masked else torch.ones_like(mask)}
        made |= {name: rows.put_back(torch.cat(types)[None]) for name, types in self.types.items()}
        return {name: value.to(self.device) for name, value in made.items()}

    def run(
        self,
        call: dict[str, Any],
        rows: PaddedRows,
        sign: float | None = None,
        handed: Run | None = None,
        *,
        unpad: bool,
        shared: bool = False,
    ) -> Run:
        """Run the documents in one call, with or without its pads; with `sign` add their gradients.

        With `shared` rows compute common prefixes once. `handed` replaces the inputs of layers.
        """
        # For lengths (2, 1) in rows of 3, padded on the left, the places are [1, 2] and [5]; without pads [0, 1] and
        # [2].
        index, shape = rows.index(torch.device("cpu")), rows.shape
        padded = dict(enumerate(index.split(list(rows.lengths))))
        if unpad:
            known = share(rows, call["input_ids"]) if shared else None
            gather = None if known is None else known.layout(torch.device("cpu")).sequence_gather
            index = torch.arange(rows.num_tokens) if gather is None else gather.index
            shape = (1, (known or rows).num_packed)
        following = Following(dict(enumerate(index.split(list(rows.lengths)))), shape, handed or {})
        with set_inside(self.unpadding, is_on=unpad, sharing=self.unpadding.sharing if shared else None):
            return self._run(call, rows.shape, padded, following, sign)

    def alone(self, sign: float | None, handed: Run) -> Run:
        """Run each document by itself, with the options of [`PaddedProbe.run`]."""
        found: Run = {}
        for i, tokens in enumerate(self.tokens):
            shape, places = (1, len(tokens)), {i: torch.arange(len(tokens))}
            found |= self._run(self._call_of(i), shape, places, Following(places, shape, handed), sign)
        return found

    def _run(
        self,
        call: dict[str, Any],
        shape: tuple[int, int],
        places: dict[int, torch.Tensor],
        following: Following,
        sign: float | None,
    ) -> Run:
        """Run the documents whose tokens have these places among the `B * L` of the call."""
        last = len(self.tokens) - 1

        def run() -> Run:
            states, logits = self.score(call, shape, places[max(places)][-1:])
            outputs = zip(places, self.documents_of(states, places.values(), shape), strict=True)
            if self.score.head is None:
                return {i: Result(None, output) for i, output in outputs}
            # A head treats every token by itself, so one position is enough: the last one of the last document.
            return {i: Result(output, logits if i == last else None) for i, output in outputs}

        return traced(self.subject, run, following, sign, self._losses)

    def documents_of(self, output: torch.Tensor, places: Iterable[torch.Tensor], shape: Sequence[int]) -> Documents:
        """Return each document's part of `(B, L, V)`, or its row of `(B, V)`."""
        # A sequence classifier has one output for each row, `(B, V)`.
        if output.dim() > 2 and output.shape[:2] == shape:
            flat = output.flatten(0, 1)
            return [flat[place] for place in places]
        return list(output.split(1))

    def _losses(self, run: Run) -> Documents:
        """Return a fixed random weighting of each document's output, and of the scored position."""
        outputs = {i: own.output for i, own in run.items() if own.output.requires_grad}
        if outputs and (own := run[max(run)]).states is not None and own.logits is not None:
            # The single scored position gets the weight of all tokens.
            outputs[len(self.tokens)] = own.logits.float() * sum(map(len, self.tokens))
        losses = []
        for i, output in outputs.items():
            generator = torch.Generator().manual_seed(self.seed + 1 + i)
            weights = torch.randn(output.shape, generator=generator) / output.shape[-1] ** 0.5
            losses.append((output.float() * weights.to(output.device)).sum())
        return losses


def apart(run: Run, expected: Run) -> float:
    """Return the largest relative difference of a document's output."""
    return max(relative_difference(run[i].output, own.output) for i, own in expected.items())
