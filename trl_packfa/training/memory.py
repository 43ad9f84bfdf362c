"""What one GPU must hold while it trains: an estimate from the model's shape, every term by a formula of its own.

Left out: CUDA's own context (about half a gigabyte), fragmentation, and what DeepSpeed or FSDP share out.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass

from ..kernels.lm_head.frozen import positions_per_tile
from .config import PackedSFTConfig
from .model_shape import ModelShape

# What CUDA takes for itself, and what fragmentation adds to an estimate.
RESERVED, SLACK = 1e9, 1.15
# TRL's fused LM head computes the logits in tiles of so many tokens and vocabulary entries.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768
# Bytes of optimizer state per trained parameter: numbers kept, bytes of each (None: those of the parameter).
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
    "LoRA is fused); LM head: gradient of the hidden states, in fp32 if the head trains, and one tile of logits"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the largest micro-batch, by what they are for."""

    weights: float
    adapter: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(asdict(self).values())

    @property
    def needed(self) -> float:
        """Bytes that a GPU should have for it, with slack and what CUDA takes."""
        return self.total * SLACK + RESERVED


def estimate(shape: ModelShape, args: PackedSFTConfig, tokens: int, *, fused_norms: bool = False) -> Memory:
    """For a largest micro-batch of so many tokens, pads included; `fused_norms` says that Liger computes RMSNorms."""
    quantized = args.load_in_4bit or args.load_in_8bit
    mixed = args.bf16 or args.fp16
    parameter = (2 if quantized else 4) if shape.lora_rank else shape.dtype_bytes  # TRL's choice for adapters
    numbers, size = _state(str(args.optim))
    full = 0 if shape.lora_rank else shape.trainable
    # Autocast keeps a half-precision copy of weights that train, for as long as the forward runs.
    casts = full * 2 if mixed and shape.dtype_bytes == 4 else 0
    return Memory(
        weights=_weights(shape, args) + casts,
        adapter=shape.trainable * parameter if shape.lora_rank else 0,
        gradients=shape.trainable * parameter,
        optimizer=shape.trainable * numbers * (size or parameter),
        activations=_activations(shape, args, tokens, 2 if mixed else shape.dtype_bytes, fused_norms=fused_norms),
        logits=_logits(shape, tokens, 2 if mixed else shape.dtype_bytes, trains=bool(full)),
    )


def without_checkpointing(args: PackedSFTConfig) -> PackedSFTConfig:
    """The same arguments with `gradient_checkpointing=False`."""
    args = copy.copy(args)
    args.gradient_checkpointing = args.activation_checkpointing = False
    return args


def layer_bytes(shape: ModelShape, activation: int, *, fused_mlp: bool = False, fused_norms: bool = False) -> int:
    """What autograd keeps of one layer for one token: norms in fp32, the inputs of every product, what attention and
    the gated product need; counted on Llama's layer. Norms by Liger keep their input only, MLPs whose LoRA is fused
    gate and up only."""
    wide = 4 * shape.hidden + 2 * shape.query + 2 * shape.key_value + (2 if fused_mlp else 4) * shape.feed_forward
    return (0 if fused_norms else 8 * shape.hidden) + activation * wide


def fuses_mlps(args: PackedSFTConfig) -> bool:
    """Whether a run's arguments let LoRA fuse whole gated MLPs."""
    everywhere = args.lora_target_modules in (["all-linear"], "all-linear")
    return args.use_peft and args.fused_lora and everywhere and not args.lora_dropout and not args.load_in_8bit


def _logits(shape: ModelShape, tokens: int, activation: int, *, trains: bool) -> float:
    if trains:
        tile = min(tokens, _TILE_TOKENS) * min(shape.head, _TILE_WORDS)
        return tokens * shape.hidden * 4 + tile * activation + shape.head * shape.hidden * 4
    # Over the whole vocabulary; weights of another dtype are cast whole.
    tile = min(tokens, positions_per_tile(shape.head)) * shape.head
    cast = shape.head * shape.hidden * activation if activation != shape.dtype_bytes else 0
    return tokens * shape.hidden * activation + tile * activation + cast


def _activations(
    shape: ModelShape, args: PackedSFTConfig, tokens: int, activation: int, *, fused_norms: bool
) -> float:
    layer = layer_bytes(shape, activation, fused_mlp=fuses_mlps(args), fused_norms=fused_norms)
    kept = shape.layers * (shape.dtype_bytes * shape.hidden if args.gradient_checkpointing else layer)
    recomputed = layer if args.gradient_checkpointing else 0
    # A quantized layer is unpacked, one weight at a time, wherever it is used.
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
    """Numbers per parameter and their bytes; of an unknown optimizer as Adam's."""
    name = optimizer.removeprefix("OptimizerNames.").lower()
    kept = next((state for known, state in _STATES.items() if known in name), _STATES["adam"])
    return (kept[0], 1) if "8bit" in name else kept
