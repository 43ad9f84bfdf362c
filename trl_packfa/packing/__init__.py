"""Lengths to plans: pure functions on numpy arrays. Knows no model, no transformers and no trl."""

from .best_fit import best_fit_decreasing
from .buffer import BufferedRows, pack_buffer
from .microbatches import document_cost, fewest_micro_batches, imbalance, recut, recut_over_ranks
from .overflow import OVERFLOW_POLICIES, WRAP, PackingReport, Spans, plan_overflow, require_policy
from .sampler import PackedBatchSampler
from .trained import TrainedTokens

__all__ = [
    "OVERFLOW_POLICIES",
    "WRAP",
    "BufferedRows",
    "PackedBatchSampler",
    "PackingReport",
    "Spans",
    "TrainedTokens",
    "best_fit_decreasing",
    "document_cost",
    "fewest_micro_batches",
    "imbalance",
    "pack_buffer",
    "plan_overflow",
    "recut",
    "recut_over_ranks",
    "require_policy",
]
