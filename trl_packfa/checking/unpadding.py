"""The check of `unpad=True`: padded batches with and without their pads, forwards and backwards, on this model.

With `share_prefixes=True` rows whose common prefix runs once are then compared with rows that each hold it.

The same batch, padded on the right or on the left, runs with its pads, as without a patch, and without them. In some
models padded rows differ from their documents alone: recurrent state runs through pads, or frequencies depend on the
longest row. Then the rows without pads are compared with each document by itself, and the report says so.

Shape letters: B rows, L row length, T true tokens, n tokens of a document, V vocabulary or labels.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comparison import VISIBLE, Comparison
from ..compile import uncompiled
from ..errors import TRAIN_PADDED, PackingError, UnsupportedModel, first_line, is_out_of_memory
from ..layout.padded_rows import PaddedRows, rows_of_lengths
from ..layout.prefix_tree import SHORTEST
from ..layout.shared_rows import share
from ..memory import return_freed_memory
from ..override import set_inside
from ..parallel.zero3 import gradients_taken
from ..patching.inspect import forward_takes, inner_model, known_ids, max_positions
from ..patching.state import find_state
from .compare import relative_difference
from .depth import layers_to_skip, skipping
from .documents import Documents, draw_documents, known_tokens
from .engine import Compared, compare
from .following import Following
from .modes import without_random_numbers
from .probe import traced
from .report import CheckReport
from .runs import Arrangement, Run, dtype_of
from .scoring import Scorer, is_multiple_choice
from .subject import Subject, compute_dtype, device_of

# Lengths of the rows in tokens: unequal, and one row of a single token.
_LENGTHS = (11, 1, 37, 24)
# Lengths of rows that share a prefix: the prefix, the three branches after it, and one more row that shares nothing.
_PREFIX, _BRANCHES, _OTHER = SHORTEST + 4, (11, 1, 24), 13
# Columns of pads that even the longest row has.
_EXTRA = 3
# Arguments that tell a model which tokens see each other in both directions, and types of a row's tokens to try: two
# images among text (Gemma 3), and a prefix whose tokens have the type 0 (PaliGemma).
_TYPES = ("token_type_ids", "mm_token_type_ids")
_PATTERNS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda place: ((place >= 3) & (place < 8)) | ((place >= 12) & (place < 20)),
    lambda place: place >= 5,
)


def check_unpadding(
    model: nn.Module, *, documents: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> CheckReport:
    """Measure whether padded batches give the same results with and without their pads, on this model as it is now.

    It runs about a thousand tokens forwards and backwards, half of them, in a large model on a CPU, through one layer
    of each kind. Modes, gradients and random state are left as they were.

    Args:
        model (`torch.nn.Module`):
            A model patched with `unpad=True`: causal LM, sequence or token classifier, or backbone; bare or wrapped.
        documents (`Sequence[Sequence[int]]`, *optional*):
            Token ids that the model knows. Without documents ids are random.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random numbers.

    Raises:
        [`UnsupportedModel`]: if the model is not patched with `unpad=True`, or passes its backbone no mask.
    """
    state = find_state(model)
    if state is None or state.unpadding is None:
        raise UnsupportedModel(
            "the model is not patched to run without pads.", do="Call trl_packfa.patch(model, unpad=True) first."
        )
    if isinstance(model, DistributedDataParallel):
        model = model.module
    started = time.perf_counter()
    known = known_tokens(documents, None, known_ids(inner_model(model)))
    with (
        gradients_taken(model) as parts,
        torch.enable_grad(),
        without_random_numbers(model, training=True),
        uncompiled(model),
        # The check's losses may read pads: pooling of a first column does in rows padded on the left.
        set_inside(state.unpadding, guards=False, takes_left=True),
    ):
        subject, most = Subject(model, state, parts), max_positions(state.parts.backbone)
        lengths = [min(length, most or length) for length in _LENGTHS]
        tokens, _ = draw_documents(lengths, known, known_ids(inner_model(model)), seed)
        probe = PaddedProbe(subject, tokens, seed)
        skipped = layers_to_skip(subject, probe.run_once)
        kinds = Subject(model, state, parts, skipped=skipped) if skipped else subject
        report = _measure(probe, PaddedProbe(kinds, tokens, seed))
        with skipping(skipped):
            report = report.with_rows(_measure_sharing(kinds, known, seed))
    return_freed_memory()
    return replace(report, seconds=round(time.perf_counter() - started, 3))


def _measure(probe: PaddedProbe, kinds: PaddedProbe) -> CheckReport:
    """Measure rows padded on the right in the whole model, and rows padded on the left in one layer of each kind."""
    subject = probe.subject
    with skipping(kinds.subject.skipped):
        left = _compare_side(kinds, left=True)
        if left.excess > 1 and probe.positions:  # let the model make its own positions: some begin at 2
            left = _compare_side(kinds, left=True, positions=False)
    sides = [_compare_side(probe, left=False), left]
    if not probe.unpadding.calls:
        raise UnsupportedModel(
            f"{type(inner_model(subject.model)).__name__} passes its backbone no attention_mask.",
            why=["a padded batch without its mask cannot be told from one without pads"],
            do="Train it padded, or pack it: trl_packfa.patch(model) without unpad.",
        )
    # Pooling that reads the first column reads a pad in rows padded on the left.
    takes_left = subject.state.patch.level != "stack" or subject.anywhere(sides[0].excess > 1 or sides[1].excess <= 1)
    sides = sides if takes_left else sides[:1]
    rows = probe.rows(left=takes_left)
    call = probe.batch(rows)
    against, figures = "padded", []
    found = max(sides, key=lambda side: side.excess)
    # The model's own padded rows may be wrong: state may run through pads, or frequencies depend on the longest row.
    if subject.anywhere(not found.excess <= 1):
        alone = compare(subject, probe.alone, [partial(probe.run, call, rows, unpad=True)])
        if alone.excess <= 1:
            figures = [Comparison("pads seen", found.forward.difference, math.inf)]
            against, found = "alone", alone
    plain = probe.run(call, rows, unpad=True)
    visible = difference_of(probe.run(probe.batch(rows, masked=False), rows, unpad=False), plain)
    counted = difference_of(probe.run(call, rows, unpad=False), plain)
    if takes_left and counted > max(found.forward.allowed, VISIBLE):
        figures.append(Comparison("pads counted", counted, math.inf))
    return CheckReport(
        rows=(*found.rows("unpadding", against), Comparison("unpadding control", visible, VISIBLE), *figures),
        dtype=str(compute_dtype(subject.model, dtype_of(plain))).removeprefix("torch."),
        bidirectional=bool(probe.types),
        takes_left=takes_left,
    )


def _compare_side(probe: PaddedProbe, *, left: bool, positions: bool = True) -> Compared:
    """Compare rows padded on one side, with their pads and without.

    Left-padded rows with pads get positions that count from each row's first token, if the model takes positions.
    """
    rows = probe.rows(left=left)
    call = probe.batch(rows)
    reference = dict(call)
    if left and positions and probe.positions:
        reference["position_ids"] = rows.position_ids(probe.device)
    padded, without = partial(probe.run, reference, rows, unpad=False), partial(probe.run, call, rows, unpad=True)
    return compare(probe.subject, padded, [without])


def _measure_sharing(subject: Subject, known: torch.Tensor, seed: int) -> tuple[Comparison, ...]:
    """Compare rows that share their prefix with the same rows run separately; nothing if no rows are shared.

    Both run without pads, which was compared before. The documents are drawn from `known` token ids.
    """
    state = subject.state
    assert state.unpadding is not None
    most = max_positions(state.parts.backbone)
    sharing, room = state.unpadding.sharing, None if most is None else (most - _PREFIX) // 2
    if sharing is None or sharing.refusal or (room is not None and room < 1):
        return ()
    branches = [min(length, room or length) for length in _BRANCHES]
    lengths = [_PREFIX, *branches, _OTHER]
    (prefix, *rest, other), _ = draw_documents(lengths, known, known_ids(inner_model(subject.model)), seed)
    probe = PaddedProbe(subject, [*(torch.cat([prefix, ids]) for ids in rest), other], seed)
    rows = probe.rows(left=False)
    call = probe.batch(rows)
    separate = partial(probe.run, call, rows, unpad=True)
    found = compare(subject, separate, [partial(separate, shared=True)])
    alone, first = separate(), rest[0]
    # The control: one document of prefix, first and last branch, in which the last branch sees the first.
    tokens = torch.cat([prefix, first, rest[-1]])[None].to(probe.device)
    own = torch.cat([torch.arange(len(prefix)), torch.arange(len(prefix) + len(first), tokens.shape[1])])
    with torch.no_grad(), set_inside(state.unpadding, sharing=None):
        seeing = Arrangement({0: own}, (1, tokens.shape[1])).run(probe.score, {"input_ids": tokens}, [own[-1:]])
    visible = relative_difference(seeing[0].states, alone[len(rest) - 1].states)
    return (*found.rows("sharing"), Comparison("sharing control", visible, VISIBLE))


def difference_of(run: Run, expected: Run) -> float:
    """Return the largest relative difference of a document's output."""
    return max(relative_difference(run[i].states, own.states) for i, own in expected.items())


class PaddedProbe:
    """A few padded rows of these documents, and the ways to run them."""

    def __init__(self, subject: Subject, tokens: Documents, seed: int) -> None:
        self.subject, self.model, self.tokens, self.seed = subject, subject.model, tokens, seed
        state = subject.state
        assert state.unpadding is not None
        self.unpadding, self.device = state.unpadding, device_of(subject.model)
        inner = inner_model(self.model)
        most = max_positions(state.parts.backbone)
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
        if any(module is self.score.head for module in state.parts.stack.modules()):
            # It gets rows with pads, and rows without.
            self.score.head = None
        names = [name for name in _TYPES if forward_takes(inner, name)]
        # Token types of each document by the argument's name.
        self.types: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():  # before any trace: the first call may run the model twice to find out how to score
            self._require_text(names)
            if state.parts.takes_images:
                self.types = self._types_with_spans(names)

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

    def _types_with_spans(self, names: list[str]) -> dict[str, list[torch.Tensor]]:
        """Return token types by which this model lets tokens see each other in both directions, else those of a text.

        They stand for images: the check has none, as each model takes pixels in its own form.
        """
        rows, before, of_text = self.rows(left=False), self.unpadding.bidirectional, self.types
        for name, pattern in itertools.product(names, _PATTERNS):
            self.types = {name: [pattern(torch.arange(len(ids))).long() for ids in self.tokens]}
            try:
                self.score(self.batch(rows), rows.shape, torch.tensor([0]))
            # The model's own code may need images with these types, and raise anything without them.
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue
            if self.unpadding.bidirectional > before:
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
        padded = inside = Arrangement(dict(enumerate(index.split(list(rows.lengths)))), shape)
        if unpad:
            known = share(rows, call["input_ids"]) if shared else None
            gather = None if known is None else known.layout(torch.device("cpu")).sequence_gather
            index = torch.arange(rows.num_tokens) if gather is None else gather.index
            shape = (1, (known or rows).num_packed)
            inside = Arrangement(dict(enumerate(index.split(list(rows.lengths)))), shape)
        with set_inside(self.unpadding, is_on=unpad, sharing=self.unpadding.sharing if shared else None):
            return self._run(call, padded, Following(inside, handed or {}), sign)

    def alone(self, sign: float | None, handed: Run) -> Run:
        """Run each document by itself, with the options of [`PaddedProbe.run`]."""
        found: Run = {}
        for i, tokens in enumerate(self.tokens):
            own = Arrangement.of_one(i, len(tokens))
            found |= self._run(self._call_of(i), own, Following(own, handed), sign)
        return found

    def _run(self, call: dict[str, Any], arrangement: Arrangement, following: Following, sign: float | None) -> Run:
        # A head treats every token by itself, so one position is enough: the last one of the last document.
        last = len(self.tokens) - 1
        scored = [place[-1:] if i == last else place[:0] for i, place in arrangement.places.items()]
        return traced(self.subject, lambda: arrangement.run(self.score, call, scored), following, sign, self.seed)
