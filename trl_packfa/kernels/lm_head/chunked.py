"""The LM head of the trainer: it scores trained positions only, in chunks of logits that are never kept.

TRL's head multiplies three times with a frozen head: for the logits, again for the logits in the backward, and for the
gradient. But the gradient of the hidden states is linear in the gradient of each log-probability. So here it is
computed together with the logits and only scaled later. That takes two products. A head that trains takes four.

Shape letters: B rows, L row length, P trained positions, D model dim, V vocabulary; n positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from .. import devices
from ..liger import DTYPES

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

# Number of logits of a chunk. On a CPU larger products are faster, up to these 64 MB of float32; one buffer serves all
# chunks. In half precision there is a float32 copy, too, unless a kernel reads it. A GPU is kept busy by a thousand
# positions: half a gigabyte of float32.
_TILE, _TILE_IN_HALF, _TILE_ON_GPU = 16 * 1024**2, 4 * 1024**2, 128 * 1024**2
# Numbers of positions are multiples of it; smaller chunks would read the head's weight too often.
_FEWEST = 128


class Head(Override):
    """A forward of a causal LM that scores its own logits in calls with `fused_lm_head=True`, as TRL asks for scores.

    The replaced forward runs in all calls. Without `measures`, entropy and accuracy are zeros.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any] | None = None) -> None:
        super().__init__(module, original)
        self.__signature__ = forward_signature(module)
        self.measures = True

    @around_graphs
    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the forward. With `fused_lm_head`, return TRL's output type."""
        if not fused_lm_head:
            return self.call_original(*args, **kwargs)
        given = [kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch")]
        return self._run(args, kwargs, given)

    @around_graphs
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Any]) -> FusedCausalLMOutput:
        output = self.call_original(*args, **kwargs)
        found = self._score(output.logits, None, None, Transform(), *given)
        found.aux_loss = getattr(output, "aux_loss", None)
        if found.aux_loss is None and kwargs.get("output_router_logits"):
            # TRL asked for it, but this architecture balances no experts (Llama-4).
            found.aux_loss = output.logits.new_zeros(())
        return found

    # The number of labelled positions differs in every batch, so this runs outside of graphs.
    @outside_of_graphs
    def _score(
        self,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        transform: Transform,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> FusedCausalLMOutput:
        """Score logits `(B, L, V)`, or hidden states `(B, L, D)` with the head's weight, bias and transform."""
        # Imported here, because models can be patched without TRL. Only TRL calls this method.
        from trl.trainer.utils import FusedCausalLMOutput

        device = (states if weight is None else weight).device
        states, labels_BL = (tensor.to(device) for tensor in aligned(states, labels, shift_labels))
        mask = labels_BL != -100
        # `masked_scatter` keeps a micro-batch without trained labels connected to the model.
        log_probs, entropy, is_top1 = (
            score.new_zeros(mask.shape).masked_scatter(mask, score)
            for score in self._scores(states[mask], weight, bias, labels_BL[mask], transform)
        )
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / count, log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask
        )

    def _scores(self, states: torch.Tensor, *inputs: Any) -> Any:
        return LogProbs.apply(states, *inputs, self.measures)


class ChunkedHead(Head):
    """A [`Head`] that multiplies only the hidden states of labelled positions, and keeps no logits.

    The model's own logits are scored if the head's weight is not plain, or if experts' losses need router logits.
    """

    def __init__(self, module: PreTrainedModel, original: Callable[..., Any] | None = None) -> None:
        super().__init__(module, original)
        self.transform = Transform.of(module.config)

    @around_graphs
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Any]) -> FusedCausalLMOutput:
        module: Any = self.module
        by_config = getattr(module.config.get_text_config(), "output_router_logits", False)
        if kwargs.get("output_router_logits", by_config) or self.refusal():
            return super()._run(args, kwargs, given)
        hidden_BLD = module.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        head = module.get_output_embeddings()
        return self._score(hidden_BLD, head.weight, getattr(head, "bias", None), self.transform, *given)

    @outside_of_graphs
    def refusal(self) -> str:
        """Return the reason why the weight cannot be multiplied here, `""` if it can."""
        module: Any = self.module
        weight = getattr(module.get_output_embeddings(), "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return "its LM head has no plain weight"
        return "its LM head is split over processes" if isinstance(weight, DTensor) or is_in_parts(weight) else ""


def undo_head(module: Any) -> None:
    """Restore the forward that a causal LM had before it got a [`Head`]."""
    head = vars(module).get("forward")
    if isinstance(head, Head):
        module.forward = head.original


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


class LogProbs(torch.autograd.Function):
    """Autograd function that returns log-probabilities `(P,)` of labels, entropies `(P,)` and top-1 flags `(P,)`.

    Inputs are hidden states `(P, D)`, the head's weight `(V, D)`, its bias `(V,)` or `None`, and labels `(P,)`; or
    logits `(P, V)` and no weight. A top-1 flag says that the label is the most likely token. Logits are
    computed in the dtype of the hidden states, or in autocast's dtype; their softmax is float32.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute scores chunk by chunk. With a frozen head, save the gradient of each log-probability, negated."""
        states, weight, bias, labels, transform, measures = inputs
        ctx.set_materialize_grads(False)
        head_trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] and not head_trains else None
        scores = states.new_zeros((3, len(states)), dtype=torch.float32)
        chunks = Chunks(states, weight, bias, labels, transform)
        with torch.autocast(states.device.type, enabled=False):
            for part, chunk in chunks:
                chunk.score(scores, part, measures=measures, slopes=slopes is not None)
                if slopes is not None:
                    slopes[part] = chunk.products if weight is None else chunk.products @ chunks.weight
        ctx.save_for_backward(*((states, weight, bias, labels) if head_trains else (slopes,)))
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
        by = -ctx.transform.scale * grad[:, None]  # each position's factor, float32
        if not ctx.head_trains:
            (slopes,) = ctx.saved_tensors
            return None if slopes is None else scaled(slopes, by), *(None,) * 5
        hidden, weight, bias, labels = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        chunks = Chunks(hidden, weight, bias, labels, ctx.transform, dtype=ctx.autocast)
        scores = hidden.new_empty((3, len(hidden)), dtype=torch.float32)
        for part, chunk in chunks:
            chunk.score(scores, part, measures=False, slopes=True)
            slopes = chunk.products
            if by_hidden is not None:
                by_hidden[part] = scaled(slopes @ chunks.weight, by[part])
            if by_weight is not None:
                add_product(by_weight, slopes.t(), scaled(hidden[part], by[part]).to(slopes.dtype))
            if by_bias is not None:
                by_bias += slopes.t() @ by[part, 0].to(slopes.dtype)
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            *(None,) * 3,
        )


def scaled(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Multiply rows `(n, X)` by factors `(n, 1)`, float32, and round the result once."""
    return torch.mul(rows, by, out=torch.empty_like(rows))


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the product of two matrices to `total`, float32. CUDA does not round it first."""
    if left.dtype in HALF and devices.makes_float32(total.device):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


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
        scales = (getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
        scale = next(filter(None, scales), 1 / divisor if divisor else 1.0)
        if divisor and text.model_type == "hyperclovax":  # it multiplies by it
            scale = divisor
        return cls(scale, getattr(text, "final_logit_softcapping", None))


def positions_per_chunk(dtype: torch.dtype, words: int, *, on_cpu: bool) -> int:
    """Return the number of positions of a chunk, for logits over `words` tokens of the vocabulary."""
    tile = _TILE_ON_GPU if not on_cpu else _TILE_IN_HALF if dtype in HALF else _TILE
    return max(tile // words // _FEWEST, 1) * _FEWEST


class Chunks:
    """An iterable over chunks of logits, each with its slice. The next chunk overwrites the last one."""

    def __init__(
        self,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        transform: Transform,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = states.dtype if weight is None else dtype or autocast_dtype(states) or states.dtype
        self.states, self.labels, self.transform = states, labels, transform
        self.weight: Any = None if weight is None else weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, Chunk | KernelChunk]]:
        words = self.states.shape[1] if self.weight is None else len(self.weight)
        on_cpu = devices.is_cpu(self.states.device)
        size = min(positions_per_chunk(self.dtype, words, on_cpu=on_cpu), len(self.states))
        products = self.states.new_empty((size, words), dtype=self.dtype)
        kernel = score_kernel(products) if self.transform.softcap is None else None
        in_place = kernel is not None or self.dtype == torch.float32
        floats = products if in_place else torch.empty_like(products, dtype=torch.float32)
        for start in range(0, len(self.states), max(size, 1)):
            part = slice(start, min(start + size, len(self.states)))
            count = part.stop - start
            rows = products[:count]
            if self.weight is None:
                rows.copy_(self.states[part])
            else:
                torch.mm(self.states[part].to(self.dtype), self.weight.t(), out=rows)
            if self.bias is not None:
                rows.add_(self.bias)
            if self.transform.scale != 1.0:
                rows.mul_(self.transform.scale)
            if kernel is not None:
                yield part, KernelChunk(rows, self.labels[part], kernel)
            else:
                logits = rows if floats is products else floats[:count].copy_(rows)
                yield part, Chunk(logits, rows, self.labels[part, None], self.transform.softcap)


def score_kernel(logits: torch.Tensor) -> Callable[..., None] | None:
    """Return [`~triton_kernel.score_rows`] if it takes logits `(n, V)`, else `None`."""
    if logits.dtype not in DTYPES or not devices.runs_triton(logits.device):
        return None
    from .triton_kernel import score_rows  # Triton is there for GPUs only

    return score_rows


class KernelChunk(NamedTuple):
    """One chunk of logits `(n, V)`, the `products`, which one kernel scores. They are overwritten."""

    products: torch.Tensor
    targets: torch.Tensor  # `(n,)`
    kernel: Callable[..., None]

    def score(self, scores: torch.Tensor, part: slice, *, measures: bool, slopes: bool) -> None:
        """Do what [`Chunk.score`] does."""
        self.kernel(self.products, self.targets, scores[:, part], measures=measures, slopes=slopes)


class Chunk:
    """One chunk of logits `(n, V)`, float32, with targets `(n, 1)`. They and the `products` are overwritten.

    A pass over a chunk costs 2 to 8 % of its product with a head of 512 features, so there are few passes.
    """

    def __init__(
        self, logits: torch.Tensor, products: torch.Tensor, target: torch.Tensor, softcap: float | None
    ) -> None:
        self.logits, self.products, self.target = logits, products, target
        self.curve: torch.Tensor | None = None
        if softcap is not None:
            bent = logits.div_(softcap).tanh_()
            self.curve = 1 - bent.square()
            bent.mul_(softcap)

    def score(self, scores: torch.Tensor, part: slice, *, measures: bool, slopes: bool) -> None:
        """Write log-probabilities to this part of `scores` `(3, P)`; with `measures` also entropies and top-1 flags.

        With `slopes` the derivatives of the target's log-probability by the head's output, negated and without the
        transform's factor, overwrite the products.
        """
        if measures:  # each step overwrites what the one before has made
            scores[2, part] = self.logits.max(-1).indices == self.target.view(-1)  # faster than `argmax` on a CPU
        log_probs = torch.log_softmax(self.logits, -1, out=self.logits)
        scores[0, part] = log_probs.gather(-1, self.target)[:, 0]
        if measures:
            scores[1, part] = -log_probs.exp().mul_(log_probs).sum(-1)
        if slopes:
            self._write_slopes()

    def _write_slopes(self) -> None:
        # Of a likely target 1 - p has few digits left if p was rounded to half precision.
        of_target = torch.expm1(self.logits.gather(-1, self.target)).to(self.products.dtype)
        if devices.is_cpu(self.logits.device):  # where torch's exponential of float32 in half precision is slow
            self.products.copy_(self.logits.exp_())
        else:
            torch.exp(self.logits, out=self.products)
        self.products.scatter_(-1, self.target, of_target)
        if self.curve is not None:
            self.products.mul_(self.curve)
