"""TRL's fused LM head, and a way around it where it does not compute the model's own loss.

TRL multiplies the backbone's output with `lm_head.weight` and knows the scalings of some architectures. A model that
does something else in between (ModernBERT's prediction head, say) would train on wrong log-probabilities, packed or
not, and one whose backbone is not where TRL looks for it raises (Llama-4). Their log-probabilities are computed from
the model's own logits instead.

Shape letters: B rows, L row length, V vocabulary, P trained positions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from .exactness import quiet, vocabulary_of
from .head import TrainedHead

logger = logging.getLogger(__name__)

_TOKENS = 16
# Largest difference of a log-probability that rounding explains; wrong heads are off by whole units.
_ALLOWED, _ALLOWED_HALF = 1e-3, 0.25
# Trained positions that are scored at a time: keeps the temporaries of a large vocabulary small.
_CHUNK = 256


def ensure_own_loss(model: Any, *, seed: int) -> TrainedHead | OwnHead | None:
    """Give a model the cheapest head whose log-probabilities are those of its own logits, on a few random tokens, to
    within rounding: one that scores trained positions only, where no Triton kernel does; TRL's; or the logits' own.

    Args:
        model (`torch.nn.Module`):
            A causal LM with TRL's fused LM head, bare or wrapped, not yet patched.
        seed (`int`):
            Seed of the tokens.

    Returns:
        The head, or `None` for TRL's.
    """
    inner: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    by_trl, allowed = inner.forward, _allowed(model)
    if model.get_input_embeddings().weight.device.type not in ("cuda", "xpu"):
        inner.forward = head = TrainedHead(inner, by_trl)
        difference = _difference(model, seed)
        if difference is not None and difference <= allowed:
            return head
        inner.forward = by_trl
    difference = _difference(model, seed)
    if difference is not None and difference <= allowed:
        return None
    inner.forward = own = OwnHead(inner, by_trl)
    why = "it raises" if difference is None else f"log-probabilities are off by {difference:.3f}"
    logger.warning(
        "trl-packfa: TRL's fused LM head does not compute the loss of %s (%s): "
        "the model's own logits are scored, which takes more memory.",
        type(inner).__name__,
        why,
    )
    return own


def _difference(model: Any, seed: int) -> float | None:
    generator = torch.Generator().manual_seed(seed)
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(1, vocabulary_of(model), (1, _TOKENS), generator=generator).to(device)
    with quiet(model), torch.no_grad():
        try:
            fused = model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            logger.debug("trl-packfa: TRL's fused LM head: %s", error)
            return None
        logits = model(input_ids=ids, use_cache=False).logits
    own = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return float((fused.float() - own).abs().max())


def _allowed(model: Any) -> float:
    exact = next(p.dtype for p in model.parameters() if p.is_floating_point()) in (torch.float32, torch.float64)
    return (
        _ALLOWED
        if exact and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled()
        else _ALLOWED_HALF
    )


class OwnHead:
    """A causal LM's forward that scores its own logits where TRL asks for the fused LM head."""

    def __init__(self, module: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self.forward = forward
        # `generate()` reads the forward's parameters.
        self.__signature__ = inspect.Signature(list(inspect.signature(type(module).forward).parameters.values())[1:])

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The forward: TRL's output type with `fused_lm_head`, the model's own without."""
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return self.forward(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        output = self.forward(*args, **kwargs)
        logits, aux_loss = output.logits, getattr(output, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            aux_loss = logits.new_zeros(())  # asked for, but this architecture balances no experts (Llama-4)
        if shift_labels is None:
            assert labels is not None  # TRL sends one or the other
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        return _scored(logits, shift_labels.to(logits.device), num_items_in_batch, aux_loss)


def _scored(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None,
    aux_loss: torch.Tensor | None,
) -> FusedCausalLMOutput:
    """TRL's output from `logits` `(B, L, V)` and the labels `(B, L)` that they predict."""
    mask = labels != -100
    logits_PV, labels_P = logits[mask], labels[mask]
    scores = [_score(*part) for part in zip(logits_PV.split(_CHUNK), labels_P.split(_CHUNK), strict=True)]
    log_probs, entropy, is_top1 = (torch.cat(part) for part in zip(*scores, strict=True))
    # `masked_scatter` keeps a micro-batch without trained labels connected to the model.
    log_probs, entropy = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (log_probs, entropy))
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / count,
        log_probs=log_probs,
        entropy=entropy,
        is_top1=torch.zeros_like(mask).masked_scatter(mask, is_top1),
        label_mask=mask,
        aux_loss=aux_loss,
    )


def _score(logits_PV: torch.Tensor, labels_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_probs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
        is_top1 = logits_PV.argmax(-1) == labels_P
    return log_probs_PV.gather(-1, labels_P[:, None])[:, 0], entropy, is_top1
