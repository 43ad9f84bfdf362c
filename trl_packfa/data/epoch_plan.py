"""Plan of an epoch under a strategy: steps, micro-batches, padding, balance and cost, from document lengths alone.

The trainer's `packing_plan` and `trl-packfa plan` both use it. Numbers of steps, rows and documents are exact. The
documents of a micro-batch are drawn at random as the Trainer draws them, but with another draw.

Shape letters: R rounds (in a round every rank runs one micro-batch), W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config.sft import PackedSFTConfig
from ..errors import figure
from ..packing import MINIBATCH, PADDED, Strategy, document_cost
from .batching import FREE, Batching

# Number of evenly spaced steps, or rounds of rows, that are sampled from a longer epoch. Means over them are within a
# few per cent. Of large steps fewer are cut, so that construction takes seconds on any number of ranks, and of a large
# dataset evenly spaced documents are drawn.
_SAMPLED, _FEWEST, _DOCUMENTS, _DRAWN = 100, 4, 200_000, 2_000_000


@dataclass(frozen=True)
class EpochPlan:
    """The plan of an epoch over `documents` with `tokens` true tokens in total.

    Rows, documents and tokens count all ranks; micro-batches count one rank. `padding` is the share of the computed
    tokens that are padding. `fill` is the true tokens divided by the capacity of the rows (the padded batch, the token
    budget, or `max_length`; `minibatch` has no capacity). `imbalance` is the epoch's time divided by its time if all
    ranks were always busy. `cost` is that of the busiest rank, waiting included, relative to the cost of one token.
    """

    strategy: Strategy
    world_size: int
    documents: int
    tokens: int
    rows: float
    steps: int
    micro_batches: float
    largest_micro_batch: int
    padding: float
    fill: float | None
    imbalance: float
    cost: float

    @property
    def examples_per_step(self) -> float:
        """Mean number of documents in a step, over all ranks."""
        return self.documents / self.steps

    @property
    def tokens_per_micro_batch(self) -> float:
        """Mean number of true tokens in a micro-batch."""
        return self.tokens / (self.micro_batches * self.world_size)


@dataclass(frozen=True)
class _Rounds:
    """Sampled micro-batches: true tokens, computed tokens and cost, each of shape `(R, W)`.

    `of` is the number of rounds in the epoch. It is larger than R if not all rounds were sampled.
    """

    true: np.ndarray
    computed: np.ndarray
    cost: np.ndarray
    of: float


def plan_epoch(lengths: np.ndarray, batching: Batching) -> EpochPlan:
    """Plan an epoch over documents of `lengths` (tokens, int64, at least one document)."""
    documents, tokens = len(lengths), int(lengths.sum())
    if batching.strategy.fills_rows:
        sampler = batching.row_sampler(lengths)
        planned, ranks = sampler.rounds(), range(batching.world_size)
        shares = [[sampler.lengths[sampler.share(row, rank)] for rank in ranks] for row in _sample(planned)]
        rounds = _measured(shares, batching, of=len(planned))
        slots, rows, fill = rounds.of, float(sampler.num_rows), sampler.fill
    else:
        drawn = batching.draw(lengths[:: -(-documents // _DRAWN)])
        slots, rest = divmod(documents, batching.world_size * batching.batch_size)
        slots += bool(rest and not batching.drop_last)
        share = slots / max(len(drawn), 1)
        if batching.drop_last:
            documents, tokens = documents - rest, int(drawn.sum() * share)
        rounds = _recut(drawn, lengths, batching) if batching.strategy.recuts_steps else _as_drawn(drawn, batching)
        rounds = replace(rounds, of=rounds.of * share)
        rows, fill = rounds.of * batching.world_size, None
        if not batching.strategy.packs:
            rows, fill = float(documents), _ratio(rounds.true.sum(), rounds.computed.sum())
        elif batching.strategy.recuts_steps:
            fill = _ratio(rounds.true.sum(), batching.micro_batch_tokens(lengths) * rounds.true.size)
    waiting, busy = rounds.cost.max(axis=1, initial=0).sum(), rounds.cost.sum() / batching.world_size
    return EpochPlan(
        strategy=batching.strategy,
        world_size=batching.world_size,
        documents=documents,
        tokens=tokens,
        rows=rows,
        # Rounded up, because a last step with fewer micro-batches is a step too.
        steps=max(-int(-slots // batching.accumulation), 1),
        micro_batches=max(rounds.of, 1.0),
        largest_micro_batch=batching.micro_batch_tokens(lengths),
        padding=1 - _ratio(rounds.true.sum(), rounds.computed.sum()),
        fill=fill,
        imbalance=_ratio(waiting, busy),
        # Scale the sampled rounds' cost to the epoch, by their share of the tokens.
        cost=float(waiting) * _ratio(tokens, rounds.true.sum()),
    )


def _as_drawn(drawn: np.ndarray, batching: Batching) -> _Rounds:
    """Measure the micro-batches as they are drawn: padded, or packed into one row each."""
    true = drawn.sum(axis=2)
    if not batching.strategy.packs:
        # Padded: every row is as wide as the widest, and attention over its padding is computed.
        width, rows = batching.padded(drawn.max(axis=2)), (drawn > 0).sum(axis=2)
        return _Rounds(true, width * rows, rows * document_cost(width, batching.quadratic), len(drawn))
    computed = batching.padded(true)
    # Packed: each padding token of a row costs one token, and almost no attention.
    cost = document_cost(drawn, batching.quadratic).sum(axis=2) + computed - true
    return _Rounds(true, computed, cost, len(drawn))


def _recut(drawn: np.ndarray, lengths: np.ndarray, batching: Batching) -> _Rounds:
    """Measure the steps after the examples of each are re-cut into fewer, fuller micro-batches over all ranks."""
    budget, micro_batches = batching.micro_batch_tokens(lengths), []
    starts = range(0, len(drawn), batching.accumulation)
    sampled = _sample(starts, most=max(_DOCUMENTS // max(drawn[: batching.accumulation].size, 1), _FEWEST))
    for start in sampled:
        dealt = batching.recut(drawn[start : start + batching.accumulation], budget=budget)
        micro_batches += [list(round_) for round_ in zip(*dealt, strict=True)]
    return _measured(micro_batches, batching, of=len(micro_batches) * len(starts) / max(len(sampled), 1))


def _measured(micro_batches: list[list[np.ndarray]], batching: Batching, *, of: float) -> _Rounds:
    """Measure rounds of micro-batches. `micro_batches` has, per round and rank, the lengths of the documents."""
    shape = (len(micro_batches), batching.world_size)
    true = np.array([[part.sum() for part in ranks] for ranks in micro_batches], dtype=np.int64).reshape(shape)
    cost = np.array([[document_cost(part, batching.quadratic).sum() for part in ranks] for ranks in micro_batches])
    computed = batching.padded(true)
    return _Rounds(true, computed, cost.reshape(shape) + computed - true, of)


def _sample(of: Sequence, most: int = _SAMPLED) -> Sequence:
    most = min(most, _SAMPLED)
    return of if len(of) <= most else [of[i] for i in np.linspace(0, len(of) - 1, most).astype(int)]


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 1.0


@figure("plan of an epoch")
def summarize_plan(
    args: PackedSFTConfig, lengths: np.ndarray, *, quadratic: float, cut: str = FREE
) -> dict[str, float]:
    """Return, by name, the figures of an epoch that a user needs before the first step, from lengths after the cut."""
    batching = Batching.of(args, quadratic=quadratic, cut=cut)
    epoch = plan_epoch(lengths, batching)
    plan = {"steps_per_epoch": float(epoch.steps), "examples_per_step": epoch.examples_per_step}
    if args.sequence_parallel > 1:
        plan["tokens_per_process"] = epoch.tokens_per_micro_batch / args.sequence_parallel
    if args.strategy.fills_rows:
        filled = {"rows": epoch.rows, "documents_per_row": epoch.documents / epoch.rows, "fill": epoch.fill or 0.0}
        return plan | filled | {"imbalance": epoch.imbalance}
    plan["padding_without_packing"] = plan_epoch(lengths, Batching.of(args, strategy=PADDED)).padding
    as_drawn = plan_epoch(lengths, Batching.of(args, strategy=MINIBATCH, quadratic=quadratic))
    plan["micro_batches_per_step"] = epoch.micro_batches / epoch.steps
    plan["tokens_per_micro_batch"] = epoch.tokens_per_micro_batch
    if args.strategy.recuts_steps:
        plan |= {"imbalance_padded": as_drawn.imbalance}
    return plan | {"imbalance": epoch.imbalance}
