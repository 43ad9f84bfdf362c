"""A frozen LM head on CUDA in two products instead of three, with TRL's Triton kernels.

TRL's head computes the logits again in its backward, in tiles of the vocabulary. Here the gradient of the input is
computed in the forward, from logits over the whole vocabulary, and only scaled later, for the reason in `chunked.py`.

Shape letters: P trained positions, D model dim, V vocabulary; n positions of a tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from trl.kernels import chunked_logprob

from .chunked import Chunks, TrainedHead, Transform

# Number of logits of a tile, half a gigabyte in half precision, and its largest number of positions. A few thousand
# positions keep a GPU busy.
_ELEMENTS, _MOST, _MULTIPLE = 2**28, 4096, 128
_TRANSFORM = ("vocab_start", "n_cols", "logit_scale", "softcap", "inv_t", "HAS_SOFTCAP")
_FOLD = (*_TRANSFORM, "HAS_ENTROPY", "HAS_LOG_SUM_SQ_PROBS", "HAS_MEAN_LOGITS", "HAS_IS_TOP1", "BLOCK_SIZE")
_SLOPE = (*_TRANSFORM, "HAS_LOGPROB_GRAD", "HAS_ENTROPY_GRAD", "BLOCK_SIZE")
# Functions of TRL's module, with the number of arguments that are passed by position and the names of the others.
_ASKED = {
    "_forward_kernel": (10, _FOLD),
    "_forward_tile": (10, _FOLD),
    "_backward_kernel": (7, _SLOPE),
    "_backward_tile": (7, _SLOPE),
    "_use_triton": (0, ("device",)),
    "_addmm_fp32": (0, ("acc", "a", "b")),
}


class ScoringKernels(NamedTuple):
    """TRL's kernels, each in Triton and in torch: statistics of logits, and gradients in place of logits.

    If the installed ones have other arguments, TRL's own head is used.
    """

    fold: Any
    fold_in_torch: Callable[..., None]
    slope: Any
    slope_in_torch: Callable[..., None]
    uses_triton: Callable[[torch.device], bool]
    add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    block: int


@cache
def scoring_kernels() -> ScoringKernels | None:
    """Return TRL's kernels, `None` if the installed TRL has different ones."""
    found = {name: getattr(chunked_logprob, name, None) for name in _ASKED}
    block = getattr(chunked_logprob, "_BLOCK_SIZE", None)
    if block is None or any(_arguments(found[name])[skip:] != wanted for name, (skip, wanted) in _ASKED.items()):
        return None
    return ScoringKernels(*found.values(), block)  # type: ignore[arg-type]


def _arguments(function: Any) -> tuple[str, ...]:
    if function is None:
        return ()
    names = getattr(function, "arg_names", None)  # functions that Triton compiles have this attribute
    return tuple(inspect.signature(function).parameters if names is None else names)


def positions_per_tile(words: int) -> int:
    """Return the number of positions of a tile, for logits over `words` tokens of the vocabulary."""
    return min(max(_ELEMENTS // words // _MULTIPLE, 1) * _MULTIPLE, _MOST)


class FrozenHead(TrainedHead):
    """A [`TrainedHead`] for a frozen head on CUDA, in two products. The replaced forward runs if the head trains."""

    def _scores(self, *inputs: Any) -> Any:
        return FrozenLogProbs.apply(*inputs, self.transform, self.measures)

    def _is_for(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        trains = weight.requires_grad or (bias is not None and bias.requires_grad)
        return can_be_frozen(weight) and not trains


def can_be_frozen(weight: torch.Tensor) -> bool:
    """Tell whether a head's weight is on CUDA, where [`FrozenLogProbs`] is faster, and TRL has the kernels for it."""
    return weight.device.type == "cuda" and scoring_kernels() is not None


class FrozenLogProbs(torch.autograd.Function):
    """Autograd function with the arguments and results of [`TrainedLogProbs`], for a head that is frozen.

    Logits are computed in the dtype of the hidden states, or in autocast's dtype; everything else is float32. The
    gradient of the hidden states is rounded once, as in TRL.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute scores tile by tile, and save the gradient of each log-probability by its hidden state."""
        hidden, weight, bias, labels, transform, measures = inputs
        ctx.set_materialize_grads(False)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # The kernels transform the logits themselves.
        tiles = Chunks(hidden, weight, bias, Transform(), size=positions_per_tile(len(weight)))
        scorer = _Scorer(tiles.weight, transform, measures=measures)
        scores = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in tiles:
                scorer.score(logits, labels[part], scores[:, part], None if slopes is None else slopes[part])
        ctx.save_for_backward(slopes)
        is_top1 = scores[2].bool()
        ctx.mark_non_differentiable(scores[1], is_top1)
        return scores[0], scores[1], is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        """Scale the saved gradients in float32."""
        (slopes,) = ctx.saved_tensors
        if grad is None or slopes is None:
            return (None,) * 6
        return torch.mul(slopes, grad.float()[:, None], out=torch.empty_like(slopes)), *(None,) * 5


class _Scorer:
    """The computation of one tile of positions after the other."""

    def __init__(self, weight: torch.Tensor, transform: Transform, *, measures: bool) -> None:
        kernels = scoring_kernels()
        assert kernels is not None
        self.kernels, self.weight, self.measures = kernels, weight, measures
        self.options = {
            "vocab_start": 0,
            "n_cols": len(weight),
            "logit_scale": transform.scale,
            "softcap": transform.softcap or 1.0,
            "inv_t": 1.0,
            "HAS_SOFTCAP": transform.softcap is not None,
            "BLOCK_SIZE": kernels.block,
        }

    def score(
        self,
        logits_nV: torch.Tensor,
        labels_n: torch.Tensor,
        scores_3n: torch.Tensor,
        slopes_nD: torch.Tensor | None,
    ) -> None:
        """Write log-probabilities, entropies and top-1 flags of a tile to `scores_3n`; overwrite the logits.

        Write the gradients of the log-probabilities by the hidden states to `slopes_nD`, if it is given.
        """
        top, before = (logits_nV.new_full((len(labels_n),), float("-inf"), dtype=torch.float32) for _ in range(2))
        total, weighted, squares, plain, chosen = logits_nV.new_zeros((5, len(labels_n)), dtype=torch.float32)
        asked = {"HAS_ENTROPY": self.measures, "HAS_IS_TOP1": self.measures}
        asked |= {"HAS_LOG_SUM_SQ_PROBS": False, "HAS_MEAN_LOGITS": False}
        by_triton = self.kernels.uses_triton(logits_nV.device)
        fold = self.kernels.fold[(len(labels_n),)] if by_triton else self.kernels.fold_in_torch
        statistics = (top, total, weighted, squares, plain, before, chosen)
        fold(logits_nV, logits_nV.stride(0), labels_n, *statistics, **asked, **self.options)
        log_total = top + total.log()
        scores_3n[0] = chosen - log_total
        if self.measures:
            scores_3n[1] = log_total - weighted / total
            scores_3n[2] = (chosen >= top) & (chosen > before)
        if slopes_nD is None:
            return
        self._to_slopes(logits_nV, labels_n, log_total, by_triton)
        if slopes_nD.dtype == logits_nV.dtype:
            torch.mm(logits_nV, self.weight, out=slopes_nD)
        else:  # float32 hidden states under autocast
            self.kernels.add_product(slopes_nD.zero_(), logits_nV, self.weight)

    def _to_slopes(
        self, logits_nV: torch.Tensor, labels_n: torch.Tensor, log_total: torch.Tensor, by_triton: bool
    ) -> None:
        """Overwrite logits with the derivatives of the label's log-probability by the head's output."""
        grid = (len(labels_n), -(-logits_nV.shape[1] // self.kernels.block))
        slope = self.kernels.slope[grid] if by_triton else self.kernels.slope_in_torch
        # The kernel does not read the arguments of the entropy and its gradient, so any tensor will do.
        given = (labels_n, log_total, log_total, torch.ones_like(log_total), log_total)
        asked = {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False}
        slope(logits_nV, logits_nV.stride(0), *given, **asked, **self.options)
