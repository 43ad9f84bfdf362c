"""The routers' auxiliary loss, of the micro-batches that the padded run would have.

Switch Transformers' loss (arXiv 2101.03961) is, over the experts, the share of tokens that an expert is given times
its mean probability: a product of two means over a padded micro-batch, so not that of other micro-batches. Within one
it is linear in the probabilities once the shares are known, so that an example's part of it can be computed wherever
the example runs, as long as all of its padded micro-batch run at the same time.

Backbones say here what their routers chose, see `forwards.py`; TRL's own computation, which counts every token of a
row, pads included, is not asked for.

Shape letters: T tokens, G padded micro-batches, X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..errors import UnsupportedModel

_ASKED = "output_router_logits"
# Backbones are deep inside wrappers (PEFT, DDP, TRL's head) that hand no list down, so it goes by the thread.
_COLLECTED: ContextVar[list[torch.Tensor] | None] = ContextVar("trl_packfa_router_logits", default=None)


@contextmanager
def collecting() -> Iterator[list[torch.Tensor]]:
    """For the length of a `with` block, patched backbones put their router logits here, layer by layer."""
    found: list[torch.Tensor] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def asked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A backbone's arguments, with `output_router_logits=True` inside of [`collecting`]."""
    return kwargs if _COLLECTED.get() is None else {**kwargs, _ASKED: True}


def told(outputs: Any) -> Any:
    """A backbone's outputs as they are; inside of [`collecting`] their router logits are noted."""
    found, logits = _COLLECTED.get(), getattr(outputs, "router_logits", None)
    if found is not None and logits is not None:
        found += logits
    return outputs


def without(text_config: Any) -> dict[str, bool]:
    """Arguments for a call that leaves the auxiliary loss out, for a model of this text config."""
    return {_ASKED: False} if hasattr(text_config, _ASKED) else {}


def balances_experts(text_config: Any, coefficient: float | None) -> bool:
    """Whether TRL trains the routers' auxiliary loss of a model of this text config, with `router_aux_loss_coef`."""
    coefficient = getattr(text_config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return hasattr(text_config, _ASKED) and coefficient != 0.0


class BalancedModel:
    """A patched model of experts whose auxiliary loss is the padded micro-batches'.

    Args:
        model (`torch.nn.Module`):
            Called as TRL calls it.
        groups (`torch.Tensor`):
            For each token the number of its padded micro-batch, G for padding, `(T,)`.
        tokens (`Sequence[int]` or `torch.Tensor`):
            True tokens of each of the G padded micro-batches, on all ranks together.
        share (`float`):
            What the sum over the G losses is multiplied with.
        reduce (`Callable`, *optional*):
            Sums a tensor over the ranks, where they share padded micro-batches.

    Attributes:
        layers (`int`): how many layers of the last call had routers.
    """

    layers = 0

    def __init__(
        self,
        model: Any,
        groups: torch.Tensor,
        tokens: Sequence[int] | torch.Tensor,
        *,
        experts_per_token: int,
        share: float = 1.0,
        reduce: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.model, self.groups, self.tokens = model, groups, tokens
        self.experts_per_token, self.share, self.reduce = experts_per_token, share, reduce

    def __call__(self, **inputs: Any) -> Any:
        """The model's forward."""
        if inputs.get("fused_lm_head"):
            # TRL's head and the model would compute the loss of the packed row; `asked` asks the backbone alone.
            inputs[_ASKED] = False
        with collecting() as logits:
            outputs = self.model(**inputs)
        self.layers = len(logits)
        if logits:
            loss = balancing_loss(logits, self.groups, self.tokens, self.experts_per_token, self.reduce)
            outputs.aux_loss = self.share * loss
        elif outputs.aux_loss is None:
            outputs.aux_loss = self.groups.new_zeros((), dtype=torch.float32)  # this one has no experts (Doge may)
        return outputs


def balancing_loss(
    router_logits: Sequence[torch.Tensor],
    groups: torch.Tensor,
    tokens: Sequence[int] | torch.Tensor,
    experts_per_token: int,
    reduce: Callable[[torch.Tensor], Any] | None = None,
) -> torch.Tensor:
    """The sum over padded micro-batches of what transformers' `load_balancing_loss_func` makes of each.

    Args:
        router_logits (`Sequence[torch.Tensor]`):
            Of each layer, `(T, X)`.
        groups (`torch.Tensor`):
            For each token the number of its padded micro-batch, G for padding, `(T,)`.
        tokens (`Sequence[int]` or `torch.Tensor`):
            True tokens of each of the G padded micro-batches.
        experts_per_token (`int`):
            K.
        reduce (`Callable`, *optional*):
            Sums a tensor over the ranks that hold other tokens of the same padded micro-batches.

    Raises:
        [`UnsupportedModel`]: if these are no logits of every token for every expert.
    """
    experts, device = router_logits[0].shape[-1], router_logits[0].device
    groups, tokens_G = groups.to(device), torch.as_tensor(tokens, device=device)
    # A row for each padded micro-batch, and one more for padding, which is dropped at the end.
    given = torch.zeros(len(tokens_G) + 1, experts, device=device)
    likely = torch.zeros_like(given)
    for logits in router_logits:
        if logits.dim() != 2 or logits.shape != (len(groups), experts):
            raise UnsupportedModel(
                f"router logits of shape {tuple(logits.shape)} for {len(groups)} tokens and {experts} experts.",
                why=["the auxiliary loss needs what each layer's router made of every token"],
                do="Set router_aux_loss_coef=0.0 to train without it.",
            )
        likely_TX = torch.softmax(logits.to(device).float(), dim=-1)
        chosen_TK = likely_TX.detach().topk(experts_per_token, dim=-1).indices
        # Shares are counts: no gradient flows through them, in transformers neither.
        given.index_add_(0, groups, torch.zeros_like(likely_TX).scatter_(1, chosen_TK, 1.0).detach())
        likely = likely.index_add(0, groups, likely_TX)
    # Only the shares: the loss is linear in the probabilities, so that the ranks' parts of it add up by themselves.
    if reduce is not None:
        given = reduce(given)
    # Means over tokens and layers together, as in transformers. `clamp`: a padded micro-batch may have no token.
    rows_G1 = (tokens_G * len(router_logits)).float()[:, None].clamp(min=1)
    return experts * ((given[:-1] / rows_G1) * (likely[:-1] / rows_G1)).sum()
