"""Compare the LM head that trains with the model's own logits on the first batch: its loss and gradients.

The rest of the proof takes gradients from the head's input on. This module measures the code that scores labels in
training, ours or TRL's, where it is used: on all hidden states and labels of the first batch. A head treats every
token by itself, so log-probability and gradient of a few positions are compared. If the head's weights train, their
gradient is compared, too: it is a sum over all positions.

Shape letters: B rows, L row length, P trained positions, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ContaminationError
from ..patching import router_loss
from ..patching.inspect import inner_model
from ..runtime.override import forwards_set
from ..runtime.zero3 import is_engine, is_in_parts
from .compare import GRADIENT_FLOORS, nan_as_inf, relative_difference
from .scoring import Scorer
from .subject import rounding_dtype

# Number of compared positions, and number of positions whose logits are in memory at a time.
_SAMPLES, _CHUNK = 16, 64


class HeadProof(NamedTuple):
    """Difference between the LM head that trains and the model's own logits.

    Attributes:
        difference (`float`), allowed (`float`): relative, of the worst quantity.
        what (`str`): name of this quantity.
        positions (`int`): number of trained positions.
    """

    difference: float
    allowed: float
    what: str
    positions: int

    def require_exact(self) -> None:
        """Raise [`ContaminationError`] with the numbers if the head computes another loss."""
        if self.difference <= self.allowed:
            return
        raise ContaminationError(
            f"the LM head that trains is not exact on the first training batch: {self.what} of {self.positions} "
            f"trained positions is off by {self.difference:.2e} (allowed {self.allowed:.2e}).",
            why=["the head scores trained positions with its own forward and backward; they differ from the model's "
                 "own logits with torch's cross-entropy"],
            do="Please report it. check_packing=False trains without this proof.",
        )  # fmt: skip


def check_head(model: nn.Module, batch: Mapping[str, Any], outputs: Any) -> HeadProof | None:
    """Compare the head that trains with the model's own logits.

    It returns `None` if they cannot be compared: the head's weights are split over ranks, or it is not a module. The
    model must accept `fused_lm_head=True`. `outputs` are the backbone's for this packed batch.
    """
    if isinstance(model, DistributedDataParallel) or is_engine(model):
        # Their forward prepares for one backward over all parameters, which is that of the training step.
        model = cast(nn.Module, model.module)
    inner = inner_model(model)
    scorer, states = Scorer(model), getattr(outputs, "last_hidden_state", None)
    weights = [] if scorer.head is None else list(scorer.head.parameters())
    if inner.base_model is inner or states is None or not weights:
        return None
    # FSDP2's weights are whole tensors between a forward and the next one, so its modules are asked, too.
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if sharded or any(isinstance(weight, DTensor) or is_in_parts(weight) for weight in weights):
        return None
    labels = batch.get("shift_labels")  # at the token that predicts them
    if labels is None:
        labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    trained = (labels.flatten() != -100).nonzero()[:, 0]
    if not len(trained):
        return None
    options = {**router_loss.without(inner.config.get_text_config()), "use_cache": False}
    leaf = states.detach().requires_grad_(True)
    params = [leaf, *(weight for weight in weights if weight.requires_grad)]

    def given(*args: Any, **kwargs: Any) -> Any:
        return type(outputs)(**{**outputs, "last_hidden_state": leaf})

    assert scorer.head is not None
    with torch.enable_grad(), forwards_set([(inner.base_model, given)]), outputs_of(scorer.head) as outcome:
        found = model(**batch, fused_lm_head=True, **options)
        by_head = _gradients(found.loss, params)
        samples = trained[torch.linspace(0, len(trained) - 1, _SAMPLES, device=trained.device).long().unique()]
        # The gradient of the weights is a sum over all positions. If they do not train, a few positions are enough.
        parts = trained.split(_CHUNK) if len(params) > 1 else [samples]
        call = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        expected: list[torch.Tensor] = [torch.zeros_like(param, dtype=torch.float32) for param in params]
        log_probs = torch.empty(labels.numel(), device=labels.device)
        for part in parts:
            logits = scorer(call, (labels.shape[0], labels.shape[1]), part).logits
            if scorer.head is None:
                return None
            own = torch.log_softmax(logits.float(), -1).gather(-1, labels.flatten()[part, None])[:, 0]
            for total, gradient in zip(expected, _gradients(-own.sum() / len(trained), params), strict=True):
                total += gradient
            log_probs[part] = own.detach()
    scored = nn.functional.pad(found.log_probs.detach(), (0, labels.shape[1] - found.log_probs.shape[1])).flatten()
    at_samples = [gradient.flatten(0, 1)[samples] for gradient in (by_head[0], expected[0])]
    differences = {
        "the gradient of the hidden states": relative_difference(*at_samples),
        "the gradient of its weights": max(
            (_off(one, other) for one, other in zip(by_head[1:], expected[1:], strict=True)), default=0.0
        ),
        "the log-probability": _off(scored[samples], log_probs[samples]),
        "the loss": nan_as_inf(
            abs(float(found.loss) + float(scored[trained].mean())) / max(abs(float(found.loss)), 1.0)
        ),
    }
    what = max(differences, key=lambda name: differences[name])
    # Under autocast accelerate's wrapper casts the model's outputs, so the dtype is read from the head's output.
    allowed = GRADIENT_FLOORS[rounding_dtype(model, outcome[-1].dtype)]
    return HeadProof(differences[what], allowed, what, len(trained))


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """Keep the last output of a module in a `with` block."""
    outputs: list[Any] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs[:] = [output]

    with module.register_forward_hook(keep):
        yield outputs


def _gradients(loss: torch.Tensor, params: list[torch.Tensor]) -> list[torch.Tensor]:
    # `torch.autograd.grad` adds nothing to a parameter's `.grad` and calls no hook of a wrapper.
    with torch.autocast(loss.device.type, enabled=False):
        return [gradient.float() for gradient in torch.autograd.grad(loss, params)]


def _off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative; infinite if a value is not finite."""
    difference = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    return nan_as_inf(float(difference))
