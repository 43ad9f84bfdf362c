"""TRL's Triton kernels for the scores of logits and their gradients, which one tile of logits needs on CUDA.

torch's operators each pass over a tile of logits; these kernels read it once for all scores, and write the gradients
in its place.

Shape letters: n positions of a tile, D model dim, V vocabulary.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers.utils import is_triton_available

# Number of logits of a tile, half a gigabyte in half precision, and its largest number of positions. A few thousand
# positions keep a GPU busy.
_ELEMENTS, _MOST, _MULTIPLE = 2**28, 4096, 128


class Transform(NamedTuple):
    """The change of a head's output before the softmax: a factor, then a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Transform:
        """Read factor and softcap from a config of transformers.

        [`~trainers.sft.lm_head.ensure_own_loss`] compares with the model's own logits, and so finds changes that the
        config does not name.
        """
        text = config.get_text_config()
        divisor = getattr(text, "logits_scaling", None)
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None)
        return cls(scale or (1 / divisor if divisor else 1.0), getattr(text, "final_logit_softcapping", None))


class ScoringKernels(NamedTuple):
    """TRL's Triton kernels: statistics of a tile of logits, and gradients in place of the logits."""

    fold: Any
    slope: Any


# Arguments of both kernels, which are passed by name.
_TILE = ("mm_ptr", "mm_stride", "targets_ptr", "vocab_start", "n_cols", "logit_scale", "softcap", "inv_t",
         "HAS_SOFTCAP", "BLOCK_SIZE")  # fmt: skip
_FOLD = (*_TILE, "max_ptr", "sum_exp_ptr", "x_sum_exp_ptr", "sq_sum_exp_ptr", "z_sum_ptr", "max_before_target_ptr",
         "target_logit_ptr", "HAS_ENTROPY", "HAS_LOG_SUM_SQ_PROBS", "HAS_MEAN_LOGITS", "HAS_IS_TOP1")  # fmt: skip
_SLOPE = (*_TILE, "log_z_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr", "HAS_LOGPROB_GRAD",
          "HAS_ENTROPY_GRAD")  # fmt: skip
_BLOCK = 1024
_HAS_OUT_DTYPE = Version(torch.__version__) >= Version("2.8.0")


@cache
def scoring_kernels() -> ScoringKernels | None:
    """Return TRL's kernels, `None` if the installed TRL has different ones, or there is no Triton.

    They are not public in TRL (`trl/kernels/chunked_logprob.py`, TRL 1.16). Without them TRL's own head is used.
    """
    # Imported here, because models can be patched without TRL.
    from trl.kernels import chunked_logprob

    if not is_triton_available():
        return None
    found = [getattr(chunked_logprob, name, None) for name in ("_forward_kernel", "_backward_kernel")]
    same = all(_arguments(kernel) == set(names) for kernel, names in zip(found, (_FOLD, _SLOPE), strict=True))
    return ScoringKernels(*found) if same else None


def _arguments(kernel: Any) -> set[str]:
    if kernel is None:
        return set()
    names = getattr(kernel, "arg_names", None)  # functions that Triton compiles have this attribute
    return set(inspect.signature(kernel).parameters if names is None else names)


def positions_per_tile(words: int) -> int:
    """Return the number of positions of a tile, for logits over `words` tokens of the vocabulary."""
    return min(max(_ELEMENTS // words // _MULTIPLE, 1) * _MULTIPLE, _MOST)


def serves(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Tell whether these kernels serve a head: it is frozen and on CUDA, and TRL has them."""
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    return weight.device.type == "cuda" and not trains and scoring_kernels() is not None


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Write `a @ b` to `out`. On CUDA a float32 `out` of half-precision products is not rounded before."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.device.type == "cuda" and _HAS_OUT_DTYPE:
        torch.addmm(out.zero_(), a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)


class KernelTile:
    """The scores of one tile of logits `(n, V)` with targets `(n, 1)`, as [`~chunked.Chunk`] computes them."""

    def __init__(self, logits_nV: torch.Tensor, target: torch.Tensor, transform: Transform, *, measures: bool) -> None:
        kernels = scoring_kernels()
        assert kernels is not None
        self.kernels, self.logits = kernels, logits_nV
        count, words = logits_nV.shape
        self.tile = {
            "mm_ptr": logits_nV,
            "mm_stride": logits_nV.stride(0),
            "targets_ptr": target[:, 0],
            "vocab_start": 0,
            "n_cols": words,
            "logit_scale": transform.scale,
            "softcap": transform.softcap or 1.0,
            "inv_t": 1.0,
            "HAS_SOFTCAP": transform.softcap is not None,
            "BLOCK_SIZE": _BLOCK,
        }
        top, before = (logits_nV.new_full((count,), float("-inf"), dtype=torch.float32) for _ in range(2))
        total, weighted, squares, plain, chosen = logits_nV.new_zeros((5, count), dtype=torch.float32)
        kernels.fold[(count,)](
            **self.tile,
            max_ptr=top,
            sum_exp_ptr=total,
            x_sum_exp_ptr=weighted,
            sq_sum_exp_ptr=squares,
            z_sum_ptr=plain,
            max_before_target_ptr=before,
            target_logit_ptr=chosen,
            HAS_ENTROPY=measures,
            HAS_LOG_SUM_SQ_PROBS=False,
            HAS_MEAN_LOGITS=False,
            HAS_IS_TOP1=measures,
        )
        self.log_total = top + total.log()
        self.log_prob = chosen - self.log_total
        if measures:
            self.entropy = self.log_total - weighted / total
            self.is_top1 = (chosen >= top) & (chosen > before)

    def grad_logits(self) -> torch.Tensor:
        """Overwrite the logits `(n, V)` by the derivative of the target's log-probability by the head's output."""
        count, words = self.logits.shape
        # The kernel does not read the arguments of the entropy and its gradient, so any tensor will do.
        self.kernels.slope[(count, -(-words // _BLOCK))](
            **self.tile,
            log_z_ptr=self.log_total,
            entropy_ptr=self.log_total,
            grad_logprobs_ptr=torch.ones_like(self.log_total),
            grad_entropy_ptr=self.log_total,
            HAS_LOGPROB_GRAD=True,
            HAS_ENTROPY_GRAD=False,
        )
        return self.logits
