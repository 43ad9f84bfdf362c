"""A model's shape: parameters, adapter and widths. Estimates of memory and cost use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from trl import get_peft_config

from ...patching.inspect import inner_model
from ...patching.router_loss import balances_experts
from ..common.batching import FREE
from ..common.flops import attention_heads, quadratic_weight
from ..common.step_cutting import how_to_cut
from .config import PackedSFTConfig


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide its memory and cost. Parameters are counted; widths are in elements.

    `quantizable` counts the weights of linear layers except the LM head, and `largest` those of the largest layer.
    `feed_forward` is the width that a token passes in one layer (all its experts together). `quadratic` is the cost of
    attention between two tokens, relative to the other cost of one token. `cut` is how `step` may cut.
    """

    model_type: str
    parameters: int
    quantizable: int
    largest: int
    trainable: int
    head: int
    layers: int
    hidden: int
    feed_forward: int
    query: int
    key_value: int
    lora_rank: int
    quadratic: float
    dtype_bytes: int
    cut: str = FREE


def shape_of(model: Any, args: PackedSFTConfig) -> ModelShape:
    """Measure a bare causal LM, with or without loaded weights, and the adapter that the arguments ask for."""
    head = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    parameters, text = model.num_parameters(), model.config.get_text_config()
    adapter = get_peft_config(args)
    if adapter is not None:
        model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    return ModelShape(
        parameters=parameters,
        quantizable=sum(linear),
        largest=max(linear, default=0),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        lora_rank=adapter.r if adapter is not None else 0,  # type: ignore[attr-defined]  # TRL's is a LoraConfig
        dtype_bytes=_dtype_bytes(args.dtype, text),
        cut=how_to_cut(args, balances_experts=balances_experts(text, args.router_aux_loss_coef))[0],
        **_widths(model, text, head),
    )


def shape_as_loaded(model: Any) -> ModelShape:
    """Measure a loaded causal LM, with its adapters and quantization as they are.

    `parameters` is the bytes of its frozen weights divided by `dtype_bytes`. No weight is left to quantize.
    """
    inner, head = inner_model(model), inner_model(model).get_output_embeddings()
    size = model.get_input_embeddings().weight.element_size()
    linear = [
        module.in_features * module.out_features
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    adapted = next((c.r for c in getattr(model, "peft_config", {}).values() if getattr(c, "r", 0)), 0)
    kept = [p for p in model.parameters() if not (adapted and p.requires_grad)]
    return ModelShape(
        parameters=sum(p.numel() * p.element_size() for p in kept) // size,
        quantizable=0,
        largest=max(linear, default=0),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        lora_rank=adapted,
        dtype_bytes=size,
        **_widths(model, inner.config.get_text_config(), head),
    )


def _widths(model: Any, text: Any, head: Any) -> dict[str, Any]:
    heads, head_dim = attention_heads(text)
    return {
        "model_type": model.config.model_type,
        "head": head.weight.shape[0],
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "feed_forward": _feed_forward(text),
        "query": heads * head_dim,
        "key_value": (getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        "quadratic": quadratic_weight(model),
    }


def _feed_forward(text: Any) -> int:
    """Return the feed-forward width that a token passes: the width of a dense MLP, or of all its experts together.

    It is four times the hidden size if the config has no width.
    """
    width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, (list, tuple)) else width
    experts = getattr(text, "num_experts_per_tok", None) or 0
    return experts * (getattr(text, "moe_intermediate_size", None) or width) if experts else width


def _dtype_bytes(dtype: str | None, text: Any) -> int:
    name = (getattr(text, "dtype", None) or "float32") if dtype in ("auto", None) else dtype
    return 4 if "32" in str(name) else 2
