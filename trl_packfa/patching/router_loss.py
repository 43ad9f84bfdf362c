"""The routers' auxiliary loss, computed for the micro-batches of the padded run.

Switch Transformers' loss (arXiv 2101.03961) is a sum over the experts: the share of tokens that go to an expert, times
its mean probability. It is a product of two means over a padded micro-batch, so other micro-batches give another loss.
Once the shares are known, it is linear in the probabilities. An example's part of it can then be computed wherever the
example runs, if all examples of its padded micro-batch run at the same time. TRL's own computation is switched off: it
counts every token of a row, pads included.

Shape letters: T tokens, G padded micro-batches, X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch

from ..errors import UnsupportedModel
from ..layout.call_context import current_call, in_call

_ASKED = "output_router_logits"


@contextmanager
def collected_logits() -> Iterator[list[torch.Tensor]]:
    """Collect the router logits of patched backbones in a list, layer by layer, inside a `with` block."""
    # Wrappers around the backbone (PEFT, DDP, TRL's head) pass no list down to it, so the thread's call holds it.
    found: list[torch.Tensor] = []
    with in_call(replace(current_call(), router_logits=found)):
        yield found


def request_logits(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a backbone's arguments, with `output_router_logits=True` inside of [`collected_logits`]."""
    return kwargs if current_call().router_logits is None else {**kwargs, _ASKED: True}


def collect_logits(outputs: Any) -> Any:
    """Return a backbone's outputs unchanged, after adding their router logits to the list of [`collected_logits`]."""
    found, logits = current_call().router_logits, getattr(outputs, "router_logits", None)
    if found is not None and logits is not None:
        found += logits
    return outputs


def without(text_config: Any) -> dict[str, bool]:
    """Return arguments that leave the auxiliary loss out of a call, for a model of this text config."""
    return {_ASKED: False} if hasattr(text_config, _ASKED) else {}


def balances_experts(text_config: Any, coefficient: float | None) -> bool:
    """Tell whether TRL trains the routers' auxiliary loss of such a model, with `router_aux_loss_coef`."""
    coefficient = getattr(text_config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return hasattr(text_config, _ASKED) and coefficient != 0.0


@dataclass(eq=False)
class BalancedModel:
    """A patched mixture-of-experts model whose auxiliary loss is that of the padded micro-batches.

    The arguments are those of [`balancing_loss`], for the tokens of all ranks together; `share` is a factor of the
    loss.
    """

    model: Any
    groups: torch.Tensor
    tokens: Sequence[int] | torch.Tensor
    _: KW_ONLY
    experts_per_token: int
    share: float = 1.0
    reduce: Callable[[torch.Tensor], Any] | None = None
    layers: int = field(default=0, init=False)  # how many layers of the last call had routers

    def __call__(self, **inputs: Any) -> Any:
        """Run the model's forward and set its `aux_loss`."""
        if inputs.get("fused_lm_head"):
            # TRL's head and the model would compute the loss of the packed row. `request_logits` sets it for the
            # backbone only.
            inputs[_ASKED] = False
        with collected_logits() as logits:
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
    """Return transformers' `load_balancing_loss_func` of each padded micro-batch, summed over them.

    Args:
        router_logits (`Sequence[torch.Tensor]`):
            Logits of each layer, `(T, X)`.
        groups (`torch.Tensor`):
            For each token the number of its padded micro-batch, G for padding, `(T,)`.
        tokens (`Sequence[int]` or `torch.Tensor`):
            True tokens of each of the G padded micro-batches.
        experts_per_token (`int`):
            Number of experts that each token uses, K.
        reduce (`Callable`, *optional*):
            Sums a tensor over the ranks that hold other tokens of the same padded micro-batches.

    Raises:
        [`UnsupportedModel`]: if a layer's logits do not have a row for each token and a column for each expert.
    """
    experts, device = router_logits[0].shape[-1], router_logits[0].device
    groups, tokens_G = groups.to(device), torch.as_tensor(tokens, device=device)
    # One row for each padded micro-batch, and one more for padding, which is dropped at the end.
    given = torch.zeros(len(tokens_G) + 1, experts, device=device)
    likely = torch.zeros_like(given)
    for logits in router_logits:
        if logits.dim() != 2 or logits.shape != (len(groups), experts):
            raise UnsupportedModel(
                f"router logits of shape {tuple(logits.shape)} for {len(groups)} tokens and {experts} experts.",
                why=["the auxiliary loss needs the logits of each layer's router for every token"],
                do="Set router_aux_loss_coef=0.0 to train without it.",
            )
        likely_TX = torch.softmax(logits.to(device).float(), dim=-1)
        chosen_TK = likely_TX.detach().topk(experts_per_token, dim=-1).indices
        # Shares are counts: no gradient flows through them, just as in transformers.
        given.index_add_(0, groups, torch.zeros_like(likely_TX).scatter_(1, chosen_TK, 1.0).detach())
        likely = likely.index_add(0, groups, likely_TX)
    # Only the shares are reduced: the loss is linear in the probabilities, so the ranks' parts of it add up.
    if reduce is not None:
        given = reduce(given)
    # Means over tokens and layers together, as in transformers. `clamp`: a padded micro-batch may have no token.
    rows_G1 = (tokens_G * len(router_logits)).float()[:, None].clamp(min=1)
    return experts * ((given[:-1] / rows_G1) * (likely[:-1] / rows_G1)).sum()
