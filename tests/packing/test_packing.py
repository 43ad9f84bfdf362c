import json

import numpy as np
import pytest
from calls import calls_of
from hypothesis import example, given
from hypothesis import strategies as st
from rank_balance import main

from trl_packfa import packing
from trl_packfa.errors import InvalidConfig, InvalidDataset
from trl_packfa.packing import WRAP, PackedBatchSampler, best_fit_decreasing, imbalance, plan_overflow

lengths_and_capacity = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)


def naive_best_fit_decreasing(lengths, capacity):
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [s for s in spaces if s >= length]
        if fitting:
            spaces.remove(min(fitting))
            spaces.append(min(fitting) - length)
        else:
            spaces.append(capacity - length)
    return spaces


@given(lengths_and_capacity, st.integers(0, 5))
def test_best_fit_is_the_textbooks(case, seed):
    lengths, capacity = case
    bins = best_fit_decreasing(np.array(lengths), capacity, np.random.default_rng(seed))
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    spaces = [capacity - sum(lengths[i] for i in b) for b in bins]
    assert sorted(spaces) == sorted(naive_best_fit_decreasing(lengths, capacity))
    assert all(space >= 0 for space in spaces)


@given(lengths_and_capacity.filter(lambda case: case[0]), st.integers(1, 3), st.integers(1, 5))
def test_sampler_gives_every_rank_its_share(case, rows, world):
    lengths, capacity = case
    options = {"capacity": capacity, "rows_per_batch": rows, "seed": 3, "world_size": world}
    samplers = [PackedBatchSampler(np.array(lengths), rank=rank, **options) for rank in range(world)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(b) for b in batches} == {len(samplers[0])}, "all ranks take part in every step"
    assert all(batch for rank in batches for batch in rank)
    seen = [i for rank in batches for batch in rank for i in batch]
    assert set(seen) == set(range(len(lengths)))
    # Repeats only where the last round has fewer documents than ranks.
    assert len(seen) - len(lengths) < world
    assert all(sum(lengths[i] for i in batch) <= rows * capacity for rank in batches for batch in rank)


def test_sampler_repacks_every_epoch_reproducibly():
    lengths = np.tile([3, 5, 7], 40)
    sampler, again = (PackedBatchSampler(lengths, capacity=15, rows_per_batch=1, seed=0) for _ in range(2))
    first = list(sampler)
    sampler.set_epoch(1)
    again.set_epoch(1)
    assert list(sampler) == list(again) != first
    assert len(list(sampler)) == len(sampler) == len(first)
    assert sampler.fill == 600 / (len(sampler) * 15)


def test_planning_grows_with_the_documents_and_no_faster():
    """Counted, not timed: a million are planned in seconds."""
    calls = []
    for count in (20_000, 100_000):
        lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, count).astype(int) + 1, 1, 2048)
        bins, made = calls_of(lambda lengths=lengths: best_fit_decreasing(lengths, 2048, np.random.default_rng(0)))
        assert lengths.sum() / (len(bins) * 2048) > 0.99
        calls.append(made)
    assert calls[1] < 5.5 * calls[0] and calls[1] < 5 * 100_000


def test_dealing_a_step_grows_with_its_documents_and_no_faster():
    """Counted: 1,024 ranks x 16 micro-batches took 7.5 s a step when every exchange looked at every document."""
    calls = []
    for ranks in (128, 1024):
        lengths = np.minimum(np.random.default_rng(0).lognormal(5.3, 1, ranks * 16), 2048).astype(np.int64) + 1
        dealt, made = calls_of(
            lambda lengths=lengths, ranks=ranks: packing.recut_over_ranks(lengths, budget=8192, world_size=ranks)
        )
        assert sorted(document for parts in dealt for part in parts for document in part) == list(range(len(lengths)))
        assert imbalance(dealt, lengths) < 1.005
        calls.append(made)
    assert calls[1] < 9 * calls[0] and calls[1] < 25 * 1024 * 16


def tokens(*labels):
    """Lengths and label masks of documents written as strings: `x` is trained, `.` is not."""
    flat = np.array([c == "x" for c in "".join(labels)], dtype=bool)
    return np.array([len(label) for label in labels]), flat


@pytest.mark.parametrize(("policy", "spans", "counts"), [
    ("truncate", [(0, 0, 3), (1, 0, 4)], {"truncated": 2, "dropped_untrained": 2, "tokens_lost": 10}),
    ("split", [(0, 0, 3), (1, 0, 4), (1, 4, 6), (2, 4, 7)], {"split": 2, "dropped_untrained": 2}),
    ("drop", [(0, 0, 3)], {"dropped_too_long": 2, "dropped_untrained": 1, "tokens_lost": 14}),
])  # fmt: skip
def test_each_overflow_policy_cuts_and_counts_as_documented(policy, spans, counts):
    # One short, one trained throughout, one trained only past the cut, one whose only label is its first token's.
    lengths, trained = tokens("xxx", "xxxxxx", "....xxx", "x")
    kept, report = plan_overflow(lengths, trained, max_length=4, policy=policy)
    assert list(zip(*(part.tolist() for part in kept), strict=True)) == spans
    assert {name: getattr(report, name) for name in counts} == counts
    assert report.packed_tokens + report.tokens_lost == report.tokens == 17
    assert report.packed_documents == len(spans)


def test_the_first_token_of_each_span_is_not_trained_and_without_max_length_nothing_is_cut():
    documents = tokens("xxxxxx", "x" * 50)
    _, report = plan_overflow(*documents, max_length=3, policy="split")
    assert report.trained_tokens == 4 + 16 * 2 + 1
    kept, report = plan_overflow(*documents, max_length=None, policy="error")
    assert report.tokens_lost == 0 and kept.stop.tolist() == [6, 50]


@given(st.lists(st.text("x.", max_size=12), min_size=1, max_size=20), st.integers(2, 8),
       st.sampled_from(["truncate", "split", "drop"]))  # fmt: skip
def test_every_token_is_packed_once_or_reported(labels, max_length, policy):
    lengths, trained = tokens(*labels)
    try:
        kept, report = plan_overflow(lengths, trained, max_length=max_length, policy=policy)
    except InvalidDataset:
        return  # nothing to train: said, not lost
    covered = [(d, t) for d, a, b in zip(*kept, strict=True) for t in range(a, b)]
    assert len(set(covered)) == len(covered) == report.packed_tokens
    assert report.tokens_lost == lengths.sum() - len(covered)
    assert (kept.stop - kept.start).max() <= max_length


REFUSED = {
    "too long": (("xxx", "xxxxxx"), "error", r"document 1 has 6 tokens, max_length is 4(.|\n)*1 of 2 documents"),
    "nothing left to train": (("x", "....x"), "truncate", "no document has a token to train on: 2 documents"),
    "unknown policy": (("xx",), "wrap", "overflow='wrap' does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(case):
    labels, policy, message = REFUSED[case]
    with pytest.raises(InvalidConfig if policy == "wrap" else InvalidDataset, match=message):
        plan_overflow(*tokens(*labels), max_length=4, policy=policy)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(2, 300), st.floats(0, 0.1),
       st.integers(0, 5))  # fmt: skip
@example([3, 5, 6, 10, 11, 19], 18, 0.0, 0)
def test_recut_keeps_every_document_and_the_budget(lengths, budget, quadratic, more):
    fewest = packing.fewest_micro_batches(np.array(lengths), budget)
    count = min(fewest + more, len(lengths))
    parts = packing.recut(np.array(lengths), budget=budget, num_micro_batches=count, quadratic=quadratic)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts)
    assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in parts)


def test_recut_levels_the_cost():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 64).astype(int), 1, 2048)
    parts = packing.recut(lengths, budget=100_000, num_micro_batches=8, quadratic=1e-3)
    cost = [sum(lengths[i] + 1e-3 * lengths[i] ** 2 for i in part) for part in parts]
    assert max(cost) / (sum(cost) / 8) < 1.05


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(10, 90), st.integers(1, 9),
       st.floats(0, 0.1))  # fmt: skip
def test_ranks_share_a_step_without_loss_and_run_equally_often(lengths, budget, world, quadratic):
    lengths = np.array(lengths)
    dealt = packing.recut_over_ranks(lengths, budget=budget, world_size=world, quadratic=quadratic)
    assert len(dealt) == world and len({len(rank) for rank in dealt}) == 1
    assert sorted(i for rank in dealt for part in rank for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[part]) <= max(budget, lengths.max()) for rank in dealt for part in rank if part)
    assert dealt == packing.recut_over_ranks(lengths, budget=budget, world_size=world, quadratic=quadratic), (
        "on every rank"
    )
    assert packing.imbalance(dealt, lengths, quadratic) >= 1 - 1e-9


@pytest.mark.parametrize(("world", "examples"), [(2, 16), (8, 64), (64, 512)])
def test_ranks_are_level_where_the_longest_document_allows(world, examples):
    rng = np.random.default_rng(world)
    for _ in range(5):
        lengths = np.clip(rng.lognormal(5, 0.8, examples), 4, 1200).astype(int)
        dealt = packing.recut_over_ranks(lengths, budget=10**6, world_size=world, quadratic=1e-4)
        cost = lengths + 1e-4 * lengths**2
        assert packing.imbalance(dealt, lengths, 1e-4) <= max(1.02, cost.max() / (cost.sum() / world) + 1e-9)


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=40), st.integers(2, 25))
def test_wrapped_rows_hold_every_trained_document_once_and_are_full(documents, capacity):
    lengths = np.array([length for length, _ in documents])
    trained = np.repeat([has_labels for _, has_labels in documents], lengths)
    keeps = [i for i, (length, has_labels) in enumerate(documents) if has_labels and length > 1]
    if not keeps:
        with pytest.raises(InvalidDataset):
            plan_overflow(lengths, trained, max_length=capacity, policy=WRAP)
        return
    spans, report = plan_overflow(lengths, trained, max_length=capacity, policy=WRAP)
    tokens = [(d, t) for d, start, stop in zip(*spans, strict=True) for t in range(start, stop)]
    assert tokens == [(i, t) for i in keeps for t in range(lengths[i])], "in order, each exactly once"
    pieces = spans.stop - spans.start
    sampler = PackedBatchSampler(pieces, capacity=capacity, rows_per_batch=1, seed=0, shuffle=False, wrapped=True)
    totals = [int(pieces[row].sum()) for row in sampler]
    assert all(total == capacity for total in totals[:-1]) and 0 < totals[-1] <= capacity
    assert report.dropped_untrained == len(documents) - len(keeps)
    assert report.tokens_lost == lengths.sum() - lengths[keeps].sum()
    assert report.split == sum(int((spans.document == i).sum() > 1) for i in keeps)


def test_rows_that_run_at_the_same_time_cost_alike():
    """Rows are all full, but attention over one long document costs more than over many short ones."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.2, 20_000), 4, 4096).astype(int)

    def waiting(quadratic):
        options = {"capacity": 4096, "rows_per_batch": 2, "seed": 3, "world_size": 8, "quadratic": quadratic}
        ranks = [list(PackedBatchSampler(lengths, rank=rank, **options)) for rank in range(8)]
        cost = lengths + 1e-3 * lengths.astype(float) ** 2
        costs = np.array([[cost[batch].sum() for batch in rank] for rank in ranks])[:, :-1]  # the last may be short
        assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(len(lengths)))
        return costs.max(axis=0).sum() / costs.mean(axis=0).sum()

    assert waiting(1e-3) < 1.02 < 1.1 < waiting(0.0)


def test_balance_is_told_by_who_deals(capsys):
    """Ours is at its bound; the padded order, the control, is far from it."""
    assert main(["--mixes", "uneven", "--ranks", "8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["longest document"] <= row["step"] <= 1.02 * row["longest document"] < row["padded order"]
    assert row["step"] <= min(row["by tokens"], row["by squares"])
