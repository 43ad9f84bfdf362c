"""TRL's fused LM head for labelled positions only, on devices without a Triton kernel.

On these devices TRL's head also multiplies padding and prompts with the vocabulary, and drops the result. This head
passes only the labelled positions to TRL's function. Log-probabilities, entropy, mean logits, loss and their gradients
are those of TRL.

Shape letters: B rows, L row length, P labelled positions, D model dim.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch import nn

from ...runtime.compile import around_graphs, outside_of_graphs
from ...runtime.override import Override, forward_signature
from .chunked import aligned, can_be_scored, lacks_triton, scored

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

# Attribute in which accelerate keeps a forward that it has wrapped in autocast.
_INSIDE_AUTOCAST = "_original_forward"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Options of TRL's head, from its arguments and from the config.
_OPTIONS = (
    "temperature",
    "cast_lm_head_to_fp32",
    "outputs",
    "final_logit_softcapping",
    "logit_scale",
    "backbone_attr",
)
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
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


class LabelledHead(Override):
    """A forward of a causal LM that computes `fused_lm_head=True` with TRL's scores of labelled positions only.

    Args:
        module (`torch.nn.Module`):
            The causal LM with TRL's forward, which runs all other calls. It also runs on devices with Triton, if the
            head is sharded or quantized, or if experts' losses need router logits.
        options (`dict[str, Any]`):
            The result of [`trl_options`].
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module)
        self.options = options
        self.__signature__ = forward_signature(module)

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
        backbone = getattr(self.module, self.options["backbone_attr"])
        with self._autocast():
            hidden_BLD = backbone(*args, **kwargs).last_hidden_state
            return self._score(hidden_BLD, *labels, num_items_in_batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return accelerate's autocast if accelerate wrapped the replaced forward in it, else an empty context."""
        if _INSIDE_AUTOCAST not in vars(self.module):
            return nullcontext()
        device, dtype = next(self.module.parameters()).device.type, _DTYPES.get(AcceleratorState().mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    @outside_of_graphs
    def _serves(self, kwargs: dict[str, Any]) -> bool:
        module: Any = self.module
        return can_be_scored(module, kwargs) and lacks_triton(module.get_output_embeddings().weight)

    # The number of labelled positions differs in every batch, so this runs outside of graphs.
    @outside_of_graphs
    def _score(
        self,
        hidden_BLD: torch.Tensor,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> FusedCausalLMOutput:
        # Imported here, because models can be patched without TRL. Callers of this method have TRL's head.
        from trl.kernels import ChunkedLogProbFunction

        head: Any = self.module.get_output_embeddings()  # type: ignore[operator]
        states = aligned(hidden_BLD, labels, shift_labels)
        hidden_BLD, labels_BL = (tensor.to(head.weight.device) for tensor in states)
        mask = labels_BL != -100
        hidden_PD, autocast = hidden_BLD[mask], nullcontext()
        if self.options["cast_lm_head_to_fp32"]:
            hidden_PD, autocast = hidden_PD.float(), torch.autocast(hidden_PD.device.type, enabled=False)
        options = [self.options[name] for name in ("final_logit_softcapping", "logit_scale", "outputs")]
        with autocast:
            scores = ChunkedLogProbFunction.apply(
                hidden_PD, head.weight, head.bias, labels_BL[mask], self.options["temperature"], _CHUNK, *options
            )
        return scored(mask, scores, num_items_in_batch, names=_FIELDS)
