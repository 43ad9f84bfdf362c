"""Operations that training a model needs per token, and the operations per second of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from trl import get_peft_config

from ..config.common import CommonConfig
from ..errors import figure
from ..parallel.zero3 import is_partitioned, whole_shape, whole_size


@dataclass(frozen=True)
class ModelFlops:
    """Floating point operations that training needs, without recomputation.

    A weight needs 2 operations in the forward, 2 for the gradient of its input, and 2 more for its own gradient if it
    trains. Attention needs 4 times its width per layer and visible token, and twice that in the backward. A token sees
    half of its document on average.
    """

    body: float  # per token, for all matrix products except the LM head's
    head: float  # per trained token, for the LM head
    attention: float  # per token and per token of its document

    @classmethod
    @figure("count of operations")
    def planned(cls, config: PreTrainedConfig, args: CommonConfig) -> ModelFlops:
        """Count the operations of a model that is not loaded yet, with the adapter that the arguments ask for.

        It is `None` if they cannot be counted, see [`~errors.figure`].
        """
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        adapter: Any = get_peft_config(args)
        return cls._of(get_peft_model(model, adapter, low_cpu_mem_usage=True) if adapter else model)

    @classmethod
    @figure("MFU")
    def of(cls, model: Any) -> ModelFlops:
        """Count the operations of a model or `PeftModel` as it will train. It may be on the meta device.

        It is `None` if they cannot be counted, see [`~errors.figure`].
        """
        return cls._of(model)

    @classmethod
    def _of(cls, model: Any) -> ModelFlops:
        text, head = model.config.get_text_config(), model.get_output_embeddings()
        heads, head_dim = attention_heads(text)
        linear = {
            m: _flops_per_weight(m.weight) * m.in_features * m.out_features
            for name, m in model.named_modules()
            # PEFT keeps the original of a module in `modules_to_save`, and never calls it.
            if isinstance(m, nn.Linear) and "original_module" not in name.split(".")
        }
        of_head = linear.get(head)
        if of_head is None:  # no `nn.Linear`: one product with its matrix
            weight = getattr(head, "weight", None)
            of_head = _flops_per_weight(weight) * whole_size(weight) if isinstance(weight, torch.Tensor) else 0
        # The head is counted separately, because it scores trained positions only.
        in_head = () if head is None else set(head.modules())
        body = sum(flops for m, flops in linear.items() if m not in in_head)
        # Experts are stacked in one parameter.
        experts = _first(text, "num_local_experts", "num_experts")
        stacked = sum(_flops_per_weight(p) * whole_size(p) for p in model.parameters() if len(whole_shape(p)) == 3)
        if experts and stacked:
            body += stacked * experts_of_token(text) / experts
        # Forward: scores and values, 2 operations per multiplication, half of the document: 2 * 2 * width / 2. The
        # backward needs twice as many.
        return cls(body, of_head, 3 * 2 * heads * head_dim * text.num_hidden_layers)

    def per_token(self, *, seen: float, trained: float = 1.0) -> float:
        """Return the operations for one true token.

        `seen` is the length of a token's document, as a mean over tokens; `trained` the share that the LM head scores.
        """
        return self.body + self.head * trained + self.attention * seen


def _flops_per_weight(weight: torch.Tensor) -> int:
    """Return the operations per token and weight; a weight's own gradient is computed only if it trains."""
    return 6 if weight.requires_grad else 4


def experts_of_token(text: Any) -> int:
    """Return how many experts a token passes in a layer, by a text config; 0 without experts."""
    return _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k") or 0


def _first(text: Any, *names: str) -> Any:
    """Return the first of these sizes that a text config has, the largest where it has one for each layer."""
    found = next((value for name in names if (value := getattr(text, name, None))), None)
    return max(found) if isinstance(found, (list, tuple)) else found


def attention_heads(text: Any) -> tuple[int, int]:
    """Return number and width of a text config's query heads, rounded means if layers differ; 0 without attention."""
    try:
        heads, head_dim = getattr(text, "num_attention_heads", 0) or 0, getattr(text, "head_dim", None)
    except RuntimeError:  # transformers' `AmbiguousGlobalPerLayerAttributeError`
        layers = range(text.num_hidden_layers)
        by_layer = zip(*(attention_heads(text.per_layer_config[layer]) for layer in layers), strict=True)
        heads, head_dim = (round(sum(numbers) / len(layers)) for numbers in by_layer)
    return heads, head_dim or text.hidden_size // max(heads, 1)


def quadratic_weight(model: Any) -> float:
    """Return the cost of attention between two tokens of a model, relative to the other cost of one token.

    It is 0 if the model's config has no sizes of it: then documents are balanced by their lengths.
    """
    return _quadratic_weight(model) or 0.0


@figure("cost of attention, so documents are balanced by their lengths")
def _quadratic_weight(model: Any) -> float:
    text = model.config.get_text_config()
    heads, head_dim = attention_heads(text)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(inner, PreTrainedModel) and not is_partitioned(inner):
        parameters = inner.num_parameters()  # which counts 4-bit weights right, although two share a byte
    else:
        parameters = sum(map(whole_size, inner.parameters()))
    # Forward operations per token: 2 per parameter, and 2 * layers * width per token that it attends to (half of the
    # document on average, scores and values). The factor of 2 cancels.
    return text.num_hidden_layers * heads * head_dim / max(parameters, 1)


def compute_dtype(args: CommonConfig) -> torch.dtype:
    """Return the dtype that matrix products run in."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return getattr(torch, args.dtype) if args.dtype not in (None, "auto") else torch.float32


def matmul_flops(
    rows: int, inner: int, columns: int, *, dtype: torch.dtype, device: torch.device, seconds: float = 0.5
) -> float:
    """Measure the best rate of `(rows, inner) @ (inner, columns)` for some seconds, in operations per second."""
    # A generator of its own, because the global one belongs to the training run.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(rows, inner, device=device, dtype=dtype, generator=generator)
    b = torch.randn(inner, columns, device=device, dtype=dtype, generator=generator)
    return 2 * rows * inner * columns / best_seconds(lambda: a @ b, seconds)


def best_seconds(act: Callable[[], Any], seconds: float) -> float:
    """Call `act` for some seconds, and return the seconds of its fastest calls. Each run of calls is waited for."""
    timer = Timer("act()", globals={"act": act}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)
