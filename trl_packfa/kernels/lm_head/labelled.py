"""TRL's fused LM head, of labelled positions only, on machines where TRL's own scores every position.

Where no Triton kernel runs, TRL's head multiplies pads and prompts with the vocabulary, too, and drops the result.
This one hands TRL's function the labelled positions: log-probabilities, entropy, mean logits and loss are TRL's, and
so are their gradients.

Shape letters: B rows, L row length, P labelled positions, D model dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import DTensor

from ...runtime.compile import around_graphs, outside_of_graphs
from ...runtime.override import Override, forward_signature
from ...runtime.zero3 import is_in_parts

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

# Where accelerate keeps the forward that it has put autocast around.
_INSIDE_AUTOCAST = "_original_forward"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What TRL's head keeps of its arguments, and what of the config.
_OPTIONS = (
    "temperature",
    "cast_lm_head_to_fp32",
    "outputs",
    "final_logit_softcapping",
    "logit_scale",
    "backbone_attr",
)
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Vocabulary entries whose logits TRL's function computes at a time, as TRL calls it.
_CHUNK = 32768


def trl_options(module: nn.Module) -> dict[str, Any] | None:
    """The options of TRL's fused head (`add_fused_lm_head`) if a model's forward is one, `None` if it is none.

    accelerate's autocast may be around it.
    """
    forward = vars(module).get(_INSIDE_AUTOCAST, vars(module).get("forward"))
    function: Any = getattr(forward, "__func__", None)
    if getattr(getattr(function, "__code__", None), "co_name", "") != "_fused_forward":
        return None
    found = inspect.getclosurevars(function).nonlocals
    return {name: found[name] for name in _OPTIONS} if all(name in found for name in _OPTIONS) else None


class LabelledHead(Override):
    """A causal LM's forward that answers `fused_lm_head=True` with TRL's scores of the labelled positions.

    Args:
        module (`torch.nn.Module`):
            The causal LM.
        original (`Callable`):
            TRL's forward, which serves all other calls, Triton's devices, and heads that are sharded, quantized or
            feed experts' losses.
        options (`dict[str, Any]`):
            What [`trl_options`] found.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(module, original)
        self.options = options
        self.__signature__ = forward_signature(module)

    @around_graphs
    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """The forward, TRL's output type with `fused_lm_head`."""
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
        """accelerate's, where it was put around the forward whose place this one takes."""
        if _INSIDE_AUTOCAST not in vars(self.module):
            return nullcontext()
        device, dtype = next(self.module.parameters()).device.type, _DTYPES.get(AcceleratorState().mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    @outside_of_graphs
    def _serves(self, kwargs: dict[str, Any]) -> bool:
        module: Any = self.module
        weight = getattr(module.get_output_embeddings(), "weight", None)
        by_config = getattr(module.config.get_text_config(), "output_router_logits", False)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            return False
        sharded = isinstance(weight, DTensor) or is_in_parts(weight)
        routed = kwargs.get("output_router_logits", by_config)
        return not (sharded or routed or weight.device.type in ("cuda", "xpu"))

    # The number of labelled positions is another in every batch.
    @outside_of_graphs
    def _score(
        self,
        hidden_BLD: torch.Tensor,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> FusedCausalLMOutput:
        # Models are patched where TRL is older, or not there: only its own head's callers come here.
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import FusedCausalLMOutput

        if shift_labels is None:
            assert labels is not None
            hidden_BLD, shift_labels = hidden_BLD[:, :-1], labels[:, 1:]
        head: Any = self.module.get_output_embeddings()  # type: ignore[operator]
        hidden_BLD, labels_BL = hidden_BLD.to(head.weight.device), shift_labels.to(head.weight.device)
        mask = labels_BL != -100
        hidden_PD, autocast = hidden_BLD[mask], nullcontext()
        if self.options["cast_lm_head_to_fp32"]:
            hidden_PD, autocast = hidden_PD.float(), torch.autocast(hidden_PD.device.type, enabled=False)
        options = [self.options[name] for name in ("final_logit_softcapping", "logit_scale", "outputs")]
        with autocast:
            scores = ChunkedLogProbFunction.apply(
                hidden_PD, head.weight, head.bias, labels_BL[mask], self.options["temperature"], _CHUNK, *options
            )
        # `masked_scatter` keeps a micro-batch without labels connected to the model.
        found: dict[str, Any] = {
            name: None if score is None else score.new_zeros(mask.shape).masked_scatter(mask, score)
            for name, score in zip(_FIELDS, scores, strict=True)
        }
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(loss=-found["log_probs"].sum() / count, label_mask=mask, **found)
