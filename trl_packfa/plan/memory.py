"""Estimate of the memory that one GPU needs for training, from the model's shape.

CUDA's own context (about half a gigabyte), fragmentation, and sharding by DeepSpeed or FSDP are left out.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import get_peft_model
from trl import get_peft_config

from ..config.sft import PackedSFTConfig
from ..data.batching import FREE
from ..data.flops import attention_heads, experts_of_token, quadratic_weight
from ..data.step_cutting import how_to_cut
from ..errors import figure
from ..kernels.lm_head.chunked import positions_per_chunk
from ..patching.router_loss import balances_experts

# Bytes that CUDA takes for itself, and the factor that fragmentation adds to an estimate.
RESERVED, SLACK = 1e9, 1.15
# Optimizer state per trained parameter: count of numbers, and bytes of each (None: the bytes of the parameter).
_STATES: dict[str, tuple[float, int | None]] = {
    "adamw_torch_4bit": (2, 1),
    "adamw_torch_8bit": (2, 1),
    "adafactor": (0, None),
    "sgd": (0, None),
    "lion": (1, None),
    "adagrad": (1, None),
    "rmsprop": (1, None),
    "adam": (2, None),
    "ademamix": (3, None),
}
FORMULA = (
    "weights: parameters x bytes (4-bit: 0.5 + 4/64, double quantization 0.5 + 1/64, of linear layers but the LM "
    "head); gradients and optimizer: per trained parameter; activations: with gradient checkpointing tokens x "
    "layers x width and one layer in full, without it every layer in full, a layer being 8 W + b (4 W + 2 Q + 2 K "
    "+ 4 F) bytes a token (W width, Q query, K key/value, F feed-forward width, b bytes of an activation; 2 F where "
    "LoRA is fused; no 8 W with Liger's norms, and with both 2 W without checkpointing); LM head: gradient of the "
    "hidden states, a chunk of logits, its own gradient in fp32 if it trains"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU with the largest micro-batch, by their use."""

    weights: float
    adapter: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Sum of all terms in bytes."""
        return sum(asdict(self).values())

    @property
    def needed(self) -> float:
        """Bytes that a GPU should have, with slack and CUDA's own memory."""
        return self.total * SLACK + RESERVED


def estimate(shape: ModelShape, args: PackedSFTConfig, tokens: int, *, fused_norms: bool = False) -> Memory:
    """Estimate the memory if the largest micro-batch has so many tokens, padding included.

    Processes that share rows hold equal parts of them. `fused_norms` means that Liger computes RMSNorms.
    """
    tokens = -(-tokens // args.sequence_parallel)
    quantized = args.load_in_4bit or args.load_in_8bit
    mixed = args.bf16 or args.fp16
    parameter = (2 if quantized else 4) if shape.lora_rank else shape.dtype_bytes  # TRL's choice for adapters
    numbers, size = _state(str(args.optim))
    full = 0 if shape.lora_rank else shape.trainable
    # Autocast keeps a half-precision copy of trained weights during the forward.
    casts = full * 2 if mixed and shape.dtype_bytes == 4 else 0
    return Memory(
        weights=_weights(shape, args) + casts,
        adapter=shape.trainable * parameter if shape.lora_rank else 0,
        gradients=shape.trainable * parameter,
        optimizer=shape.trainable * numbers * (size or parameter),
        activations=_activations(shape, args, tokens, 2 if mixed else shape.dtype_bytes, fused_norms=fused_norms),
        logits=_logits(shape, tokens, 2 if mixed else shape.dtype_bytes, trains=bool(full)),
    )


def shared_by(args: PackedSFTConfig, processes: int) -> PackedSFTConfig:
    """Copy the arguments with rows that so many processes share."""
    args = copy.copy(args)
    args.sequence_parallel = processes
    return args


def without_checkpointing(args: PackedSFTConfig) -> PackedSFTConfig:
    """Copy the arguments with `gradient_checkpointing=False`."""
    args = copy.copy(args)
    args.gradient_checkpointing = args.activation_checkpointing = False
    return args


def layer_bytes(
    shape: ModelShape,
    activation: int,
    *,
    fused_mlp: bool = False,
    fused_norms: bool = False,
    checkpointed: bool = False,
) -> int:
    """Return the bytes that autograd keeps of one layer for one token, counted on Llama's layer.

    They are norms in fp32 (Liger's keep only their input), the inputs of every product, and the tensors that attention
    and the gated product need. MLPs with fused LoRA keep only gate and up, and no result of Liger's norms, unless the
    layer is `checkpointed`.
    """
    wide = (2 if fused_mlp and fused_norms and not checkpointed else 4) * shape.hidden
    wide += 2 * shape.query + 2 * shape.key_value + (2 if fused_mlp else 4) * shape.feed_forward
    return (0 if fused_norms else 8 * shape.hidden) + activation * wide


def fuses_mlps(args: PackedSFTConfig) -> bool:
    """Tell whether a run's arguments let LoRA fuse whole gated MLPs."""
    everywhere = args.lora_target_modules in (["all-linear"], "all-linear")
    return args.use_peft and args.fused_kernels and everywhere and not args.load_in_8bit


def _logits(shape: ModelShape, tokens: int, activation: int, *, trains: bool) -> float:
    dtype = torch.bfloat16 if activation == 2 else torch.float32
    # A chunk has the whole vocabulary, of half precision also a float32 copy, and in logged steps the probabilities.
    chunk = (
        min(tokens, positions_per_chunk(dtype, shape.head, on_cpu=False)) * shape.head * (10 if activation == 2 else 8)
    )
    # Weights of another dtype are cast as a whole.
    cast = shape.head * shape.hidden * activation if activation != shape.dtype_bytes else 0
    gradient = shape.head * shape.hidden * 4 if trains else 0
    return tokens * shape.hidden * activation + chunk + cast + gradient


def _activations(
    shape: ModelShape, args: PackedSFTConfig, tokens: int, activation: int, *, fused_norms: bool
) -> float:
    checkpointed = args.gradient_checkpointing
    how = {"fused_mlp": fuses_mlps(args), "fused_norms": fused_norms, "checkpointed": checkpointed}
    layer = layer_bytes(shape, activation, **how)
    kept = shape.layers * (shape.dtype_bytes * shape.hidden if checkpointed else layer)
    recomputed = layer if checkpointed else 0
    # A quantized layer is unpacked where it is used, one weight at a time.
    unpacked = shape.largest * activation if args.load_in_4bit or args.load_in_8bit else 0
    return tokens * (kept + recomputed) + unpacked


def _weights(shape: ModelShape, args: PackedSFTConfig) -> float:
    plain = shape.parameters - shape.quantizable
    if args.load_in_4bit:
        each = 0.5 + (1 / 64 if args.use_bnb_nested_quant else 4 / 64)
    else:
        each = 1.0 if args.load_in_8bit else shape.dtype_bytes
    return plain * shape.dtype_bytes + shape.quantizable * each


def _state(optimizer: str) -> tuple[float, int | None]:
    """Return the numbers per parameter and their bytes; an unknown optimizer counts as Adam."""
    name = optimizer.removeprefix("OptimizerNames.").lower()
    kept = next((state for known, state in _STATES.items() if known in name), _STATES["adam"])
    return (kept[0], 1) if "8bit" in name else kept


def operations(frozen: bool) -> str:
    """Describe the operations that training saves without activation checkpointing, which repeats the forward."""
    return "4 operations a weight and token instead of 6" if frozen else "6 operations a weight and token instead of 8"


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


def shape_of(model: Any, args: PackedSFTConfig) -> ModelShape | None:
    """Measure a bare causal LM, with or without loaded weights, and the adapter that the arguments ask for.

    It is `None` if the model's config has no such sizes.
    """
    head = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    parameters, text = model.num_parameters(), model.config.get_text_config()
    adapter = get_peft_config(args)
    dtype = (getattr(text, "dtype", None) or "float32") if args.dtype in ("auto", None) else args.dtype
    if adapter is not None:
        model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    if (widths := _widths_if_known(model, text, head)) is None:
        return None
    return ModelShape(
        parameters=parameters,
        quantizable=sum(linear),
        largest=max(linear, default=0),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        lora_rank=adapter.r if adapter is not None else 0,  # type: ignore[attr-defined]  # TRL's is a LoraConfig
        dtype_bytes=4 if "32" in str(dtype) else 2,
        cut=how_to_cut(args, balances_experts=balances_experts(text, args.router_aux_loss_coef))[0],
        **widths,
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


_widths_if_known = figure("memory and cost of attention: the model's config has other sizes")(_widths)


def _feed_forward(text: Any) -> int:
    """Return the feed-forward width that a token passes, of all its experts together; 4 hidden sizes if unknown."""
    width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, (list, tuple)) else width
    experts = experts_of_token(text)
    return experts * (getattr(text, "moe_intermediate_size", None) or width) if experts else width
