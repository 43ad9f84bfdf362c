# type: ignore  (Triton compiles most of this file, and only machines with a GPU have it)
"""Triton's kernel of the LM head on CUDA. Import it only there, because it needs Triton.

It reads the logits twice and writes them once. torch's operators go over a float32 copy of them nine times.

Shape letters: V vocabulary; n positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 8192, 16


@triton.jit
def _score_row(
    logits: tl.tensor,
    targets: tl.tensor,
    log_probs: tl.tensor,
    entropies: tl.tensor,
    are_top1: tl.tensor,
    words: tl.tensor,
    MEASURES: tl.constexpr,
    SLOPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Score the row of this program, in float32, block by block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    target = tl.load(targets + row)
    of_target = tl.load(logits + target).to(tl.float32)
    # Sums of e^(x - top) and of (x - top) e^(x - top). `top` is the largest logit so far, so that nothing overflows.
    top, total, weighted = of_target, 0.0, 0.0
    rivals = 0  # larger logits, and equal ones before the target: of equal logits the first is the likeliest
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - new_top)
        powers = tl.exp(x - new_top)
        if MEASURES:
            products = powers * tl.where(inside, x - new_top, 0.0)
            weighted = shrink * (weighted + (top - new_top) * total) + tl.sum(products, 0)
            is_rival = (x > of_target) | ((x == of_target) & (at < target))
            rivals += tl.sum(is_rival.to(tl.int32), 0)
        total = shrink * total + tl.sum(powers, 0)
        top = new_top
    tl.store(log_probs + row, of_target - top - tl.log(total))
    if MEASURES:
        tl.store(entropies + row, tl.log(total) - weighted / total)
        tl.store(are_top1 + row, (rivals == 0).to(tl.float32))
    if SLOPES:
        for start in range(0, words, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
            probability = tl.exp(x - top) / total
            # Subtracted before it is rounded: of a likely target 1 - p has few digits left in half precision.
            tl.store(logits + at, tl.where(at == target, probability - 1.0, probability), mask=at < words)


def score_rows(
    logits: torch.Tensor, targets: torch.Tensor, scores: torch.Tensor, *, measures: bool, slopes: bool
) -> None:
    """Write log-probabilities of targets `(n,)` to `scores` `(3, n)`; with `measures` also entropies, top-1 flags.

    `logits` `(n, V)` and rows of `scores`, float32, are contiguous. With `slopes` the derivatives of the
    log-probabilities, negated, overwrite the logits.
    """
    words = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(words))
    launch: Any = _score_row[(len(logits),)]
    with torch.cuda.device_of(logits):
        launch(logits, targets, *scores, words, measures, slopes, block, num_warps=_WARPS)
