"""The check of `unpad=True`: padded batches with and without their pads, forwards and backwards, on this model.

With `share_prefixes=True` rows whose common prefix runs once are then compared with rows that each hold it.

The same batch, padded on the right or on the left, runs with its pads, as without a patch, and without them. In some
models padded rows differ from their documents alone: recurrent state runs through pads, or frequencies depend on the
longest row. Then the rows without pads are compared with each document by itself, and the report says so.

Shape letters: B rows, L row length, T true tokens, n tokens of a document, V vocabulary or labels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comparison import VISIBLE, Comparison
from ..compile import uncompiled
from ..errors import UnsupportedModel
from ..layout.prefix_tree import SHORTEST
from ..memory import return_freed_memory
from ..override import set_inside
from ..parallel.zero3 import gradients_taken
from ..patching.apply import find_state
from ..patching.inspect import find_backbone, inner_model, known_ids, max_positions
from .compare import relative_difference
from .depth import layers_to_skip, skipping
from .documents import draw_documents, known_tokens
from .engine import Compared, compare
from .padded_runs import PaddedProbe, apart
from .probe import dtype_of
from .quiet import quiet
from .report import UnpaddingReport
from .subject import Subject, compute_dtype

# Lengths of the rows in tokens: unequal, and one row of a single token.
_LENGTHS = (11, 1, 37, 24)
# Lengths of rows that share a prefix: the prefix, the three branches after it, and one more row that shares nothing.
_PREFIX, _BRANCHES, _OTHER = SHORTEST + 4, (11, 1, 24), 13


def check_unpadding(
    model: nn.Module, *, documents: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> UnpaddingReport:
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
        quiet(model, training=True),
        uncompiled(model),
        # The check's losses may read pads: pooling of a first column does in rows padded on the left.
        set_inside(state.unpadding, guards=False, takes_left=True),
    ):
        subject, most = Subject(model, state, parts), max_positions(find_backbone(model, state.patch))
        lengths = [min(length, most or length) for length in _LENGTHS]
        tokens, _ = draw_documents(lengths, known, known_ids(inner_model(model)), seed)
        probe = PaddedProbe(subject, tokens, seed)
        skipped = layers_to_skip(subject, probe.run_once)
        kinds = Subject(model, state, parts, skipped=skipped) if skipped else subject
        report = _measure(probe, PaddedProbe(kinds, tokens, seed))
        with skipping(skipped):
            report["rows"] += _measure_sharing(kinds, known, seed)
    return_freed_memory()
    return UnpaddingReport(**report, seconds=round(time.perf_counter() - started, 3))


def _measure(probe: PaddedProbe, kinds: PaddedProbe) -> dict[str, Any]:
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
    against, seen = "padded", 0.0
    found = max(sides, key=lambda side: side.excess)
    # The model's own padded rows may be wrong: state may run through pads, or frequencies depend on the longest row.
    if subject.anywhere(not found.excess <= 1):
        alone = compare(subject, probe.alone, [partial(probe.run, call, rows, unpad=True)])
        if alone.excess <= 1:
            against, seen, found = "alone", found.forward.difference, alone
    plain = probe.run(call, rows, unpad=True)
    visible = apart(probe.run(probe.batch(rows, masked=False), rows, unpad=False), plain)
    return {
        "rows": (*found.rows("unpadding", against), Comparison("unpadding control", visible, VISIBLE)),
        "pads_seen": seen,
        "unshifted": apart(probe.run(call, rows, unpad=False), plain),
        "blocks": bool(probe.types),
        "takes_left": takes_left,
        "dtype": str(compute_dtype(subject.model, dtype_of(plain))).removeprefix("torch."),
    }


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
    most = max_positions(find_backbone(subject.model, state.patch))
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
        states, _ = probe.score({"input_ids": tokens}, (1, tokens.shape[1]), own[-1:])
        (seeing,) = probe.documents_of(states, [own], tokens.shape)
    visible = relative_difference(seeing, alone[len(rest) - 1].output)
    return (*found.rows("sharing"), Comparison("sharing control", visible, VISIBLE))
