"""Choice of the LM head that computes the loss: TRL's fused head, a cheaper one, or the model's own logits.

TRL multiplies the backbone's output with `lm_head.weight` and handles the scalings of some architectures. A model with
other operations in between (for example ModernBERT's prediction head) would train on wrong log-probabilities, packed
or not. A model whose backbone is not where TRL expects it raises (Llama-4). For these models the log-probabilities are
computed from the model's own logits instead.

Shape letters: B rows, L row length, V vocabulary, P trained positions.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from ...autocast import autocast_dtype
from ...config.sft import PackedSFTConfig
from ...errors import UnsupportedModel
from ...exactness import quiet, vocabulary_of
from ...kernels.lm_head.chunked import Head, TrainedHead, aligned, scored
from ...kernels.lm_head.frozen import FrozenHead, can_be_frozen
from ...patching import router_loss
from ...patching.inspect import inner_model

logger = logging.getLogger(__name__)

_TOKENS = 16
# Largest difference of a log-probability that rounding explains. Wrong heads differ by whole units.
_ALLOWED, _ALLOWED_HALF = 1e-3, 0.25
# Number of trained positions that are scored at a time, to keep the temporaries of a large vocabulary small.
_CHUNK = 256


def ensure_own_loss(model: Any, *, seed: int) -> TrainedHead | OwnHead | None:
    """Give a model the cheapest head whose log-probabilities agree with its own on a few tokens, within rounding.

    The model is a causal LM with TRL's fused LM head, bare or wrapped, not yet patched. The choices, in order: a head
    that scores trained positions only (not on CUDA and XPU, where TRL's Triton kernel does); a head with two products
    instead of three (only there, for a frozen head); TRL's fused head, for which `None` is returned; the model's own
    logits, also for a head with more parameters to train than weight and bias (Dory's scale of each word), which at
    first may change nothing. A model that itself does not run with its dtypes and autocast's is refused.
    """
    inner: Any = inner_model(model)
    by_trl = inner.forward
    whole = next(p.dtype for p in model.parameters() if p.is_floating_point()) in (torch.float32, torch.float64)
    autocasts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()
    allowed = _ALLOWED if whole and not autocasts else _ALLOWED_HALF
    if unread := _unread(model):
        return _own_head(inner, by_trl, f"it does not train the head's {' and '.join(unread)}")
    kind = _cheapest(model)
    if kind is not None:
        inner.forward = head = kind(inner, by_trl)
        difference = _difference(model, seed)
        if difference is not None and difference <= allowed:
            if kind is FrozenHead:
                logger.info("trl-packfa: the LM head is frozen: two products instead of three, with TRL's kernels.")
            return head
        inner.forward = by_trl
    difference = _difference(model, seed)
    if difference is not None and difference <= allowed:
        return None
    if difference is None:
        _require_runnable(model, seed)
    why = "it raises" if difference is None else f"log-probabilities are off by {difference:.3f}"
    return _own_head(inner, by_trl, why)


def _unread(model: Any) -> list[str]:
    """Return the names of the head's trained parameters that a product with its weight and bias leaves out."""
    head = model.get_output_embeddings()
    named = () if head is None else head.named_parameters()
    names = {name.rpartition(".")[2] for name, parameter in named if parameter.requires_grad}
    return sorted(names - {"weight", "bias"})


def _own_head(inner: Any, by_trl: Any, why: str) -> OwnHead:
    """Give a model the head of its own logits, and say why TRL's is not used."""
    inner.forward = own = OwnHead(inner, by_trl)
    logger.warning(
        "trl-packfa: TRL's fused LM head does not compute the loss of %s (%s): "
        "the model's own logits are used, which takes more memory.", type(inner).__name__, why,
    )  # fmt: skip
    return own


def _cheapest(model: Any) -> type[TrainedHead] | None:
    """Return the kind of head that is cheaper than TRL's on this model's device, or `None`."""
    if model.get_input_embeddings().weight.device.type not in ("cuda", "xpu"):
        return TrainedHead
    # On these devices TRL's head uses a Triton kernel, and is kept if the head trains.
    weight = getattr(model.get_output_embeddings(), "weight", None)
    is_frozen = isinstance(weight, torch.Tensor) and not weight.requires_grad and can_be_frozen(weight)
    return FrozenHead if is_frozen else None


class LossHead:
    """The LM head of a run, [`ensure_own_loss`]'s. It is chosen once, and measures metrics only in logged steps."""

    def __init__(self, args: PackedSFTConfig, accelerator: Accelerator) -> None:
        self.args, self.accelerator = args, accelerator
        self.module: TrainedHead | OwnHead | None = None
        self._is_chosen = False

    def choose(self, model: Any) -> None:
        """Give the model its head, unless it has one. `model` is bare, or the engine that gathers its weights."""
        if self._is_chosen:
            return
        with self.accelerator.autocast():
            self.module = ensure_own_loss(model, seed=self.args.seed)
        self._is_chosen = True

    def measures(self, state: TrainerState, *, is_training: bool) -> bool:
        """Set and return whether the next batch measures entropy and accuracy: logged steps, as it costs a pass."""
        if not isinstance(self.module, TrainedHead):
            return True
        # The number of the step that runs now. The Trainer counts it only when it is done.
        step, every = state.global_step + 1, max(state.logging_steps, 1)
        by_steps = self.args.logging_strategy == "steps"
        first, last = step == 1 and self.args.logging_first_step, step >= state.max_steps
        self.module.measures = not is_training or not by_steps or first or last or step % every == 0
        return self.module.measures


def drop_unmeasured(metrics: dict[str, list[float]]) -> None:
    """Remove the zeros that TRL has recorded for a batch whose entropy and accuracy were not measured."""
    for name in ("entropy", "mean_token_accuracy"):
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]


def _random_ids(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary_of(model), (1, _TOKENS), generator=generator)
    return ids.to(model.get_input_embeddings().weight.device)


def _require_runnable(model: Any, seed: int) -> None:
    """Refuse a model whose own forward fails (for example with mixed dtypes), because no head can fix that."""
    weights = next(p for p in model.parameters() if p.is_floating_point())
    try:
        with quiet(model), torch.no_grad():
            model(input_ids=_random_ids(model, seed), use_cache=False)
    except (RuntimeError, ValueError) as error:
        autocast = autocast_dtype(weights)
        under = "" if autocast is None else f" under {_named(autocast)} autocast"
        raise UnsupportedModel(
            f"{type(inner_model(model)).__name__} with {_named(weights.dtype)} weights does not run{under}.",
            why=[str(error).partition("\n")[0]],
            do="Load it with dtype='float32'"
            + ("." if autocast is None else f" or '{_named(autocast)}', or train without autocast: bf16=False."),
        ) from error


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(model: Any, seed: int) -> float | None:
    ids = _random_ids(model, seed)
    # Only log-probabilities are compared, so the routers' auxiliary loss is switched off.
    options: dict[str, Any] = {"use_cache": False, **router_loss.without(inner_model(model).config.get_text_config())}
    with quiet(model), torch.no_grad():
        try:
            fused = model(input_ids=ids, labels=ids, fused_lm_head=True, **options).log_probs
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            logger.debug("trl-packfa: TRL's fused LM head: %s", error)
            return None
        logits = model(input_ids=ids, **options).logits
    own = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return float((fused.float() - own).abs().max())


class OwnHead(Head):
    """A causal LM's forward that computes the loss from its own logits if TRL asks for the fused LM head."""

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward. Return TRL's output type with `fused_lm_head`, otherwise the model's own."""
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return self.call_original(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        output = self.call_original(*args, **kwargs)
        logits, aux_loss = output.logits, getattr(output, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            aux_loss = logits.new_zeros(())  # TRL asked for it, but this architecture balances no experts (Llama-4)
        logits_BLV, labels_BL = aligned(logits, labels, shift_labels)
        mask = (labels_BL := labels_BL.to(logits.device)) != -100
        logits_PV, labels_P = logits_BLV[mask], labels_BL[mask]
        # In chunks, because a float32 softmax of all positions at once would be the largest tensor of the step.
        parts = [_score(*part) for part in zip(logits_PV.split(_CHUNK), labels_P.split(_CHUNK), strict=True)]
        return scored(mask, map(torch.cat, zip(*parts, strict=True)), num_items_in_batch, aux_loss=aux_loss)


def _score(logits_PV: torch.Tensor, labels_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_probs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
        is_top1 = logits_PV.argmax(-1) == labels_P
    return log_probs_PV.gather(-1, labels_P[:, None])[:, 0], entropy, is_top1
