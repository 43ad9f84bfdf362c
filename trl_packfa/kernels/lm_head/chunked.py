"""The LM head on devices without a Triton kernel: only trained positions are scored, in chunks, once.

On these devices TRL's head scores every position, also prompt tokens. It multiplies with the head three times: for the
logits, again for the logits in the backward, and for the gradient. With a frozen head, the gradient of the hidden
states is linear in the gradient of each log-probability. So it is computed together with the logits and only scaled
later. That takes two products of trained positions.

Shape letters: B rows, L row length, P trained positions, D model dim, V vocabulary; n positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...autocast import HALF, autocast_dtype, outside_autocast
from ...compile import around_graphs, outside_of_graphs
from ...override import Override, forward_signature
from ...parallel.zero3 import is_in_parts

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

# Number of logits of a chunk. Larger products are faster, up to these 64 MB of float32; one buffer serves all chunks.
# In half precision each chunk also needs float32 copies, and glibc allocates blocks above 32 MB anew each time.
_TILE, _TILE_IN_HALF = 16 * 1024**2, 4 * 1024**2
# Smallest number of positions of a chunk; smaller chunks would read the head's weight too often.
_FEWEST = 128


class Head(Override):
    """A forward of a causal LM with TRL's fused head."""

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None = None) -> None:
        super().__init__(module, original)
        self.__signature__ = forward_signature(module)


def undo_head(module: Any) -> None:
    """Restore the forward that a causal LM had before it got a [`Head`]."""
    head = vars(module).get("forward")
    if isinstance(head, Head):
        module.forward = head.original


class ScoringHead(Head):
    """A forward of a causal LM that scores labelled positions only in calls with `fused_lm_head=True`.

    The replaced forward runs all other calls. It also runs if the head is sharded or quantized, or if experts' losses
    need router logits.
    """

    # Maps hidden states `(P, D)`, weight, bias and labels `(P,)` to a score `(P,)` for each of `names`.
    _scores: Callable[..., Any]
    backbone = "base_model"  # the attribute of the causal LM that holds it
    names: tuple[str, ...] = ("log_probs", "entropy", "is_top1")

    @around_graphs
    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the forward. With `fused_lm_head`, return TRL's output type."""
        if not fused_lm_head:
            return self.call_original(*args, **kwargs)
        if not self._serves(kwargs):
            return self.call_original(*args, fused_lm_head=True, **kwargs)
        labels = (kwargs.pop("labels", None), kwargs.pop("shift_labels", None))
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        with self._autocast():
            hidden_BLD = getattr(self.module, self.backbone)(*args, **kwargs).last_hidden_state
            return self._score(hidden_BLD, labels, num_items_in_batch)

    @outside_of_graphs
    def _serves(self, kwargs: dict[str, Any]) -> bool:
        module: Any = self.module
        head = module.get_output_embeddings()
        weight: Any = getattr(head, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return False
        sharded = isinstance(weight, DTensor) or is_in_parts(weight)
        by_config = getattr(module.config.get_text_config(), "output_router_logits", False)
        if sharded or kwargs.get("output_router_logits", by_config):
            return False
        return self._is_for(weight, getattr(head, "bias", None))

    def _is_for(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Tell whether TRL has no Triton kernel for a head on this device."""
        return weight.device.type not in ("cuda", "xpu")

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # The number of labelled positions differs in every batch, so this runs outside of graphs.
    @outside_of_graphs
    def _score(
        self,
        hidden_BLD: torch.Tensor,
        labels: tuple[torch.Tensor | None, torch.Tensor | None],
        num_items_in_batch: torch.Tensor | int | None,
    ) -> FusedCausalLMOutput:
        module: Any = self.module
        head = module.get_output_embeddings()
        hidden_BLD, labels_BL = (tensor.to(head.weight.device) for tensor in aligned(hidden_BLD, *labels))
        mask = labels_BL != -100
        with torch.cuda.device_of(hidden_BLD):  # a split model's last device, for launches by Triton
            scores = self._scores(hidden_BLD[mask], head.weight, head.bias, labels_BL[mask])
        return scored(mask, scores, num_items_in_batch, names=self.names)


class TrainedHead(ScoringHead):
    """A [`ScoringHead`] that multiplies with the head once. Without `measures`, entropy and accuracy are zeros."""

    def __init__(self, module: PreTrainedModel, original: Callable[..., Any]) -> None:
        super().__init__(module, original)
        self.transform, self.measures = Transform.of(module.config), True

    def _scores(self, *inputs: Any) -> Any:
        return TrainedLogProbs.apply(*inputs, self.transform, self.measures)


def aligned(
    states: torch.Tensor, labels: torch.Tensor | None, shift_labels: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Align states `(B, L, ...)` with the labels `(B, L)` that they predict.

    TRL sends either `labels` or `shift_labels`. `labels` are shifted by one here, so L is one less.
    """
    if shift_labels is not None:
        return states, shift_labels
    assert labels is not None
    return states[:, :-1], labels[:, 1:]


def scored(
    mask: torch.Tensor,
    scores: Iterable[torch.Tensor | None],
    num_items_in_batch: torch.Tensor | int | None,
    *,
    names: Sequence[str] = ("log_probs", "entropy", "is_top1"),
    aux_loss: torch.Tensor | None = None,
) -> FusedCausalLMOutput:
    """Make TRL's output from the scores `(P,)` of these names of the positions in `mask` `(B, L)`."""
    # Imported here, because models can be patched without TRL. Callers of this function have TRL's head.
    from trl.trainer.utils import FusedCausalLMOutput

    # `masked_scatter` keeps a micro-batch without trained labels connected to the model.
    found: dict[str, Any] = {
        name: None if score is None else score.new_zeros(mask.shape).masked_scatter(mask, score)
        for name, score in zip(names, scores, strict=True)
    }
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(loss=-found["log_probs"].sum() / count, label_mask=mask, aux_loss=aux_loss, **found)


class TrainedLogProbs(torch.autograd.Function):
    """Autograd function that returns log-probabilities `(P,)` of labels, entropies `(P,)` and top-1 flags `(P,)`.

    Inputs are hidden states `(P, D)`, the head's weight `(V, D)`, its bias `(V,)` or `None`, and labels `(P,)`. A
    top-1 flag says that the label is the most likely token. Logits are computed in the dtype of the hidden states, or
    in autocast's dtype; their softmax is float32.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute scores chunk by chunk. With a frozen head, save the gradient of each log-probability."""
        hidden, weight, bias, labels, transform, measures = inputs
        ctx.set_materialize_grads(False)
        head_trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] and not head_trains else None
        scores = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        chunks = Chunks(hidden, weight, bias, transform)
        for part, logits in chunks:
            chunk = Chunk(logits, labels[part, None], transform, measures=measures)
            scores[0, part] = chunk.log_prob
            if measures:
                scores[1, part], scores[2, part] = chunk.entropy, chunk.is_top1
            if grad_hidden is not None:
                grad_hidden[part] = chunk.grad_logits().to(chunks.dtype) @ chunks.weight
        if head_trains:
            ctx.save_for_backward(hidden, weight, bias, labels)
        else:
            ctx.save_for_backward(grad_hidden)
        ctx.head_trains, ctx.transform, ctx.autocast = head_trains, transform, chunks.dtype
        is_top1 = scores[2].bool()
        ctx.mark_non_differentiable(scores[1], is_top1)
        return scores[0], scores[1], is_top1

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        """Scale the saved gradients, or compute the gradients of hidden states and head chunk by chunk."""
        if grad is None:
            return (None,) * 6
        if not ctx.head_trains:
            (grad_hidden,) = ctx.saved_tensors
            by_hidden = None if grad_hidden is None else grad_hidden * grad[:, None].to(grad_hidden.dtype)
            return by_hidden, *(None,) * 5
        hidden, weight, bias, labels = ctx.saved_tensors
        chunks = Chunks(hidden, weight, bias, ctx.transform, dtype=ctx.autocast)
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for part, logits in chunks:
            by_logits = Chunk(logits, labels[part, None], ctx.transform).grad_logits().mul_(grad[part, None])
            if by_bias is not None:
                by_bias += by_logits.sum(0)
            by_logits = by_logits.to(chunks.dtype)
            if by_hidden is not None:
                by_hidden[part] = (by_logits @ chunks.weight).to(hidden.dtype)
            if by_weight is not None:
                by_weight += by_logits.t() @ hidden[part].to(chunks.dtype)
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            *(None,) * 3,
        )


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


def positions_per_chunk(dtype: torch.dtype, words: int) -> int:
    """Return the number of positions of a chunk, for logits over `words` tokens of the vocabulary."""
    return max((_TILE_IN_HALF if dtype in HALF else _TILE) // words, _FEWEST)


class Chunks:
    """An iterable over chunks of logits, `(slice, (n, V))`. The next chunk overwrites the last one."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transform: Transform,
        *,
        dtype: torch.dtype | None = None,
        size: int | None = None,
    ) -> None:
        self.dtype = dtype or autocast_dtype(hidden) or hidden.dtype
        self.hidden, self.weight, self.transform = hidden, weight.to(self.dtype), transform
        self.bias = None if bias is None else bias.to(self.dtype)
        self.size = size or positions_per_chunk(self.dtype, len(weight))

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        scale, softcap = self.transform
        buffer = self.hidden.new_empty((min(self.size, len(self.hidden)), len(self.weight)), dtype=self.dtype)
        for start in range(0, len(self.hidden), self.size):
            part = slice(start, min(start + self.size, len(self.hidden)))
            logits = torch.mm(self.hidden[part].to(self.dtype), self.weight.t(), out=buffer[: part.stop - start])
            if self.bias is not None:
                logits.add_(self.bias)
            if scale != 1.0:
                logits.mul_(scale)
            yield part, logits if softcap is None else logits.float().div_(softcap).tanh_().mul_(softcap)


class Chunk:
    """The scores of one chunk of logits `(n, V)` with targets `(n, 1)`. It overwrites float32 logits.

    These are `log_prob`, and if `measures` `entropy` and `is_top1`, `(n,)` each. A pass over a chunk costs 2 to 8 % of
    its product with a head of 512 features, so there are few passes.
    """

    def __init__(
        self, logits: torch.Tensor, target: torch.Tensor, transform: Transform, *, measures: bool = False
    ) -> None:
        self.target, self.transform = target, transform
        self.curve = None if transform.softcap is None else 1 - (logits / transform.softcap).square()
        shifted, top = logits.to(torch.float32), logits.amax(-1, keepdim=True)
        likeliest = _is_first_of(logits, target, top) if measures else None
        shifted = shifted.sub_(top.to(torch.float32))
        chosen = shifted.gather(-1, target)
        self.exp = shifted.exp() if measures else shifted.exp_()
        self.total = self.exp.sum(-1, keepdim=True)
        self.log_prob = (chosen - self.total.log())[:, 0]
        if likeliest is not None:
            self.is_top1 = likeliest
            mean = torch.linalg.vecdot(self.exp, shifted) / self.total[:, 0]
            self.entropy = self.total[:, 0].log() - mean

    def grad_logits(self) -> torch.Tensor:
        """Return the derivative of the target's log-probability by the head's output, `(n, V)`, float32."""
        by = self.exp.mul_(-1 / self.total)
        by.scatter_add_(-1, self.target, torch.ones_like(self.target, dtype=by.dtype))
        if self.curve is not None:
            by.mul_(self.curve)
        return by.mul_(self.transform.scale) if self.transform.scale != 1.0 else by


def _is_first_of(logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Tell for each row whether the target is the `argmax`, `(n,)`.

    `argmax` is slow, so it runs only on rows in which the target has the largest logit.
    """
    found = (logits.gather(-1, target) == top)[:, 0]
    found[found.clone()] = logits[found].argmax(-1) == target[found, 0]
    return found
