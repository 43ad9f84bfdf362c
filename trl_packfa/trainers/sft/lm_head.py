"""Choice of the LM head that computes the loss: ours, or the model's own logits.

Our head multiplies the backbone's output with the head's weight and bias, and handles the scalings of some
architectures. A model with other operations in between (for example ModernBERT's prediction head) would train on wrong
log-probabilities, packed or not. A model whose backbone is not at `base_model` raises (Llama-4). For these models the
log-probabilities are computed from the model's own logits instead.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from ...autocast import autocast_dtype
from ...checking import vocabulary_of, without_random_numbers
from ...checking.subject import rounding_dtype
from ...comparison import TOLERANCES, Comparison
from ...config.sft import PackedSFTConfig
from ...errors import UnsupportedModel
from ...kernels.lm_head.chunked import ChunkedHead, Head
from ...patching import router_loss
from ...patching.inspect import inner_model

logger = logging.getLogger(__name__)

_TOKENS = 16


def ensure_own_loss(model: Any, *, seed: int) -> Head:
    """Give a model our head if its log-probabilities agree with the model's own on a few tokens, within rounding.

    The model is a causal LM, bare or wrapped, not yet patched. Otherwise it gets the head of its own logits, also if
    its head's weight is quantized or split over processes, or if its head has more parameters to train than weight
    and bias (Dory's scale of each word), which at first may change nothing. A model that itself does not run with its
    dtypes and autocast's is refused.
    """
    inner: Any = inner_model(model)
    original = inner.forward
    inner.forward = head = ChunkedHead(inner, original)
    why = head.refusal() or _unread(model) or _how_it_differs(model, seed)
    if not why:
        return head
    inner.forward = own = Head(inner, original)
    logger.warning(
        "trl-packfa: the model's own logits are used for the loss of %s, which takes more memory: %s.",
        type(inner).__name__, why,
    )  # fmt: skip
    return own


def _unread(model: Any) -> str:
    """Name trained parameters of the head that a product with weight and bias leaves out, `""` if there are none."""
    head = model.get_output_embeddings()
    named = () if head is None else head.named_parameters()
    names = {name.rpartition(".")[2] for name, parameter in named if parameter.requires_grad}
    unread = " and ".join(sorted(names - {"weight", "bias"}))
    return unread and f"our LM head does not train the head's {unread}"


def _how_it_differs(model: Any, seed: int) -> str:
    """Return how the head that the model has now differs from the model's own logits, `""` if by rounding alone."""
    ids = _random_ids(model, seed)
    # Only log-probabilities are compared, so the routers' auxiliary loss is switched off.
    options: dict[str, Any] = {"use_cache": False, **router_loss.without(inner_model(model).config.get_text_config())}
    with without_random_numbers(model), torch.no_grad():
        try:
            found = model(input_ids=ids, labels=ids, fused_lm_head=True, **options).log_probs
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            _require_runnable(model, ids)
            return f"our LM head raises ({error})"
        logits = model(input_ids=ids, **options).logits
    own = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    off, allowed = float((found - own).abs().max()), TOLERANCES[rounding_dtype(model, logits.dtype)].log_probs
    compared = Comparison("head", off, allowed, of=f"log-probabilities of {_TOKENS} random tokens")
    return "" if compared.holds else str(compared)


def _random_ids(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary_of(model), (1, _TOKENS), generator=generator)
    return ids.to(model.get_input_embeddings().weight.device)


def _require_runnable(model: Any, ids: torch.Tensor) -> None:
    """Refuse a model whose own forward fails (for example with mixed dtypes), because no head can fix that."""
    weights = next(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with without_random_numbers(model), torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except (RuntimeError, ValueError) as error:
        autocast = autocast_dtype(ids)
        under = "" if autocast is None else f" under {_named(autocast)} autocast"
        raise UnsupportedModel(
            f"{type(inner_model(model)).__name__} with {_named(weights)} weights does not run{under}.",
            why=[str(error).partition("\n")[0]],
            do="Load it with dtype='float32'"
            + ("." if autocast is None else f" or '{_named(autocast)}', or train without autocast: bf16=False."),
        ) from error


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class LossHead:
    """The LM head of a run, [`ensure_own_loss`]'s. It is chosen once, and measures metrics only in logged steps."""

    def __init__(self, args: PackedSFTConfig, accelerator: Accelerator) -> None:
        self.args, self.accelerator = args, accelerator
        self.module: Head | None = None

    def choose(self, model: Any) -> None:
        """Give the model its head, unless it has one. `model` is bare, or the engine that gathers its weights."""
        if self.module is None:
            with self.accelerator.autocast():
                self.module = ensure_own_loss(model, seed=self.args.seed)

    @property
    def scores_own_logits(self) -> bool:
        """`True` if the model's own logits are scored."""
        return not isinstance(self.module, ChunkedHead)

    def measures(self, state: TrainerState, *, is_training: bool) -> bool:
        """Set and return whether the next batch measures entropy and accuracy: logged steps, as it costs a pass."""
        if self.module is None:  # TRL's, which measures always
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
