"""From lengths to plans: pure functions on numpy arrays, without any model, transformers or trl."""

from .best_fit import best_fit_decreasing
from .microbatches import document_cost, fewest_micro_batches, imbalance, recut, recut_over_ranks
from .overflow import (
    BFD,
    BFD_SPLIT,
    MINIBATCH,
    OVERFLOW_POLICIES,
    PADDED,
    STEP,
    STRATEGIES,
    WRAP,
    WRAPPED,
    PackingReport,
    Spans,
    Strategy,
    TrainedTokens,
    nothing_trains,
    plan_overflow,
    require_policy,
)
from .rows import BufferedRows, PackedBatchSampler, pack_buffer

__all__ = [
    "BFD", "BFD_SPLIT", "MINIBATCH", "OVERFLOW_POLICIES", "PADDED", "STEP", "STRATEGIES", "WRAP", "WRAPPED",
    "BufferedRows", "PackedBatchSampler", "PackingReport", "Spans", "Strategy", "TrainedTokens", "best_fit_decreasing",
    "document_cost", "fewest_micro_batches", "imbalance", "nothing_trains", "pack_buffer", "plan_overflow", "recut",
    "recut_over_ranks", "require_policy",
]  # fmt: skip
