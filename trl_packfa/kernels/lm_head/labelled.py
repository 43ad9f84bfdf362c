"""TRL's fused LM head for labelled positions only, on devices without a Triton kernel.

On these devices TRL's head also multiplies padding and prompts with the vocabulary, and drops the result. This head
passes only the labelled positions to TRL's function. Log-probabilities, entropy, mean logits, loss and their gradients
are those of TRL.

Shape letters: P labelled positions, D model dim.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn

from .chunked import ScoringHead

# Attribute in which accelerate keeps a forward that it has wrapped in autocast.
_INSIDE_AUTOCAST = "_original_forward"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Options of TRL's head, from its arguments and from the config.
_OPTIONS = ("temperature", "cast_lm_head_to_fp32", "outputs", "final_logit_softcapping", "logit_scale",
            "backbone_attr")  # fmt: skip
# Number of vocabulary entries that TRL's function computes at a time; TRL uses the same number.
_CHUNK = 32768


def trl_options(module: nn.Module) -> dict[str, Any] | None:
    """Return the options of TRL's fused head (`add_fused_lm_head`), `None` if a model has no such head.

    accelerate may have wrapped the head's forward in autocast.
    """
    forward = vars(module).get(_INSIDE_AUTOCAST, vars(module).get("forward"))
    function: Any = getattr(forward, "__func__", None)
    if getattr(getattr(function, "__code__", None), "co_name", "") != "_fused_forward":
        return None
    found = inspect.getclosurevars(function).nonlocals
    return {name: found[name] for name in _OPTIONS} if all(name in found for name in _OPTIONS) else None


class LabelledHead(ScoringHead):
    """A [`ScoringHead`] with the scores of TRL's head, which has these [`trl_options`] and runs if there is Triton."""

    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module)
        self.options, self.backbone = options, options["backbone_attr"]

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return accelerate's autocast if accelerate wrapped the replaced forward in it, else an empty context."""
        if _INSIDE_AUTOCAST not in vars(self.module):
            return nullcontext()
        device, dtype = next(self.module.parameters()).device.type, _DTYPES.get(AcceleratorState().mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    def _scores(
        self, hidden_PD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels_P: torch.Tensor
    ) -> Any:
        # Imported here, because models can be patched without TRL. Callers of this method have TRL's head.
        from trl.kernels import ChunkedLogProbFunction

        autocast = nullcontext()
        if self.options["cast_lm_head_to_fp32"]:
            hidden_PD, autocast = hidden_PD.float(), torch.autocast(hidden_PD.device.type, enabled=False)
        options = [self.options[name] for name in ("final_logit_softcapping", "logit_scale", "outputs")]
        with autocast:
            return ChunkedLogProbFunction.apply(
                hidden_PD, weight, bias, labels_P, self.options["temperature"], _CHUNK, *options
            )
