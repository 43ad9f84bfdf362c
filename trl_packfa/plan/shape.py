"""A model's shape from its config alone: parameters, adapter, widths. Built on the meta device, so without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import get_peft_config

from ..errors import InvalidConfig, PackingError
from ..patching.router_loss import balances_experts
from ..training.batching import FREE
from ..training.config import PackedSFTConfig
from ..training.flops import attention_heads, quadratic_weight
from ..training.model_loading import init_kwargs
from ..training.step_packing import how_to_cut
from ..training.validation import refuse_model


@dataclass(frozen=True)
class ModelShape:
    """What memory and cost follow from; numbers of parameters, widths in elements.

    `quantizable` are the weights of linear layers but the LM head, `largest` the largest of them, `feed_forward` the
    width that a token passes through in one layer (of its experts together), `quadratic` the cost of a token attending
    to a token in units of the cost of a token, `cut` how `step` may cut.
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


def read_shape(args: PackedSFTConfig) -> ModelShape:
    """The shape of `args.model_name_or_path` with the adapter that the arguments ask for.

    Raises:
        [`InvalidConfig`]: if there is no such model, or its adapter cannot be put on it.
        [`UnsupportedModel`]: if its type cannot be packed.
    """
    name = args.model_name_or_path
    assert name is not None, "asked for a model"
    try:
        config = AutoConfig.from_pretrained(
            name, revision=init_kwargs(args).get("revision"), trust_remote_code=args.trust_remote_code
        )
        if args.packing:
            refuse_model(config.model_type, args)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        return _measured(model, args)
    except PackingError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfig(
            f"cannot make the model '{name}' from its config.",
            why=[str(error)],
            do="Check the name, or pass --tokenizer without a model: memory and attention's cost are then left out.",
        ) from error


def _measured(model: Any, args: PackedSFTConfig) -> ModelShape:
    head = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    parameters, text = model.num_parameters(), model.config.get_text_config()
    heads, head_dim = attention_heads(text)
    adapter = get_peft_config(args)
    if adapter is not None:
        model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    return ModelShape(
        model_type=model.config.model_type,
        parameters=parameters,
        quantizable=sum(linear),
        largest=max(linear, default=0),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        head=head.weight.shape[0],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        feed_forward=_feed_forward(text),
        query=heads * head_dim,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        lora_rank=adapter.r if adapter is not None else 0,  # type: ignore[attr-defined]  # TRL's is a LoraConfig
        quadratic=quadratic_weight(model),
        dtype_bytes=_dtype_bytes(args.dtype, text),
        cut=how_to_cut(args, balances_experts=balances_experts(text, args.router_aux_loss_coef))[0],
    )


def _feed_forward(text: Any) -> int:
    """Of the experts that a token goes to, where there are experts; four times the width where a config says none."""
    width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, (list, tuple)) else width
    experts = getattr(text, "num_experts_per_tok", None) or 0
    return experts * (getattr(text, "moe_intermediate_size", None) or width) if experts else width


def _dtype_bytes(dtype: str | None, text: Any) -> int:
    name = (getattr(text, "dtype", None) or "float32") if dtype in ("auto", None) else dtype
    return 4 if "32" in str(name) else 2
