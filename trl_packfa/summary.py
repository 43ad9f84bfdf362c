"""What packing makes of an epoch, told before the first step: rows, steps, micro-batches, fill and balance."""

from __future__ import annotations

import numpy as np

from .config import PackedSFTConfig
from .packing import PackedBatchSampler, document_cost, imbalance, recut_over_ranks

# Steps that are cut to estimate what a step holds; means over so many are within a few per cent.
_SAMPLED_STEPS = 100


def summarize_plan(
    args: PackedSFTConfig,
    lengths: np.ndarray,
    *,
    budget: int = 0,
    quadratic: float = 0.0,
    sampler: PackedBatchSampler | None = None,
) -> dict[str, float]:
    """What an epoch over documents of `lengths` (tokens) comes to, by name.

    Args:
        args ([`PackedSFTConfig`]):
            Strategy, batch sizes and number of processes.
        lengths (`np.ndarray`):
            Tokens of each document, as they are packed.
        budget (`int`), quadratic (`float`):
            Of `packing_strategy="step"`: tokens of a micro-batch, cost of attention.
        sampler ([`PackedBatchSampler`], *optional*):
            Of strategies that fill rows.
    """
    per_micro_batch = args.per_device_train_batch_size * args.world_size
    micro_batches = -(-len(lengths) // per_micro_batch) if sampler is None else len(sampler)
    steps = -(-micro_batches // args.gradient_accumulation_steps)
    plan = {"steps_per_epoch": float(steps), "examples_per_step": len(lengths) / steps}
    if sampler is not None:
        return {
            **plan,
            "rows": sampler.num_rows,
            "documents_per_row": len(lengths) / sampler.num_rows,
            "fill": sampler.fill,
        }
    plan["padding_without_packing"] = _padding(lengths, args.per_device_train_batch_size, args.seed)
    return plan | (_steps(args, lengths, budget, quadratic) if args.packs_steps else {})


def _padding(lengths: np.ndarray, batch_size: int, seed: int) -> float:
    """Share of a padded run's tokens that are padding, its batches drawn at random."""
    drawn = np.random.default_rng(seed).permutation(lengths)
    whole = drawn[: len(drawn) // batch_size * batch_size].reshape(-1, batch_size)
    return float(1 - whole.sum() / (whole.max(axis=1).sum() * batch_size)) if len(whole) else 0.0


def _steps(args: PackedSFTConfig, lengths: np.ndarray, budget: int, quadratic: float) -> dict[str, float]:
    """Micro-batches, their tokens, and the balance of the ranks before and after dealing anew; of random steps."""
    world, per_rank = args.world_size, args.per_device_train_batch_size * args.gradient_accumulation_steps
    drawn = np.random.default_rng(args.seed).permutation(lengths)
    size = min(per_rank * world, len(drawn) // world * world)
    if not size:
        return {}
    sampled = [drawn[i : i + size] for i in range(0, len(drawn) - size + 1, size)][:_SAMPLED_STEPS]
    dealt = [recut_over_ranks(step, budget=budget, world_size=world, quadratic=quadratic) for step in sampled]
    rounds = [len(ranks[0]) for ranks in dealt]
    before = [document_cost(step, quadratic).reshape(world, -1).sum(axis=1) for step in sampled]
    return {
        "micro_batches_per_step": float(np.mean(rounds)),
        "tokens_per_micro_batch": float(
            np.mean([step.sum() / (world * n) for step, n in zip(sampled, rounds, strict=True)])
        ),
        "imbalance_padded": float(np.mean([costs.max() / costs.mean() for costs in before])),
        "imbalance": float(np.mean([imbalance(d, step, quadratic) for d, step in zip(dealt, sampled, strict=True)])),
    }
