"""What would make a run faster on this GPU, said before it begins and never changed: gradient checkpointing that could
be off, frozen weights that every pass casts."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset

from ..kernels.liger.library import liger_kernels
from .batching import FREE, Batching
from .config import PackedSFTConfig
from .dataset import read_lengths
from .memory import estimate, without_checkpointing
from .model_shape import shape_as_loaded

logger = get_logger(__name__)

# Frozen weights below this are not worth a word.
_FEW_BYTES = 100e6


def tell_what_fits(model: Any, args: PackedSFTConfig, dataset: Any, *, cut: str = FREE) -> None:
    """Log what a run could save.

    Args:
        model (`PreTrainedModel` or `PeftModel`), args ([`PackedSFTConfig`]):
            As they are about to train.
        dataset (`Dataset`, `IterableDataset` or `None`):
            The documents, as they are packed; of a stream, lengths are not known.
        cut (`str`):
            How `step` may cut.
    """
    if (line := frozen_in_float32(model, args)) is not None:
        logger.info("trl-packfa: %s", line)
    has = memory_of(args.device)
    if has is None or dataset is None or isinstance(dataset, IterableDataset):
        return
    tokens = Batching.of(args, cut=cut).micro_batch_tokens(read_lengths(dataset))
    if (line := checkpointing_can_be_off(model, args, tokens, has)) is not None:
        logger.info("trl-packfa: %s", line)


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU, `None` of other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def frozen_in_float32(model: Any, args: PackedSFTConfig) -> str | None:
    """What float32 weights that do not train cost under `bf16`, `None` if there are none to speak of."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype is torch.float32]
    size = sum(p.numel() * p.element_size() for p in frozen)
    if not args.bf16 or size < _FEW_BYTES:
        return None
    return (
        f"the frozen weights are float32 (TRL's default), {size / 1e9:.1f} GB that every pass casts to bfloat16: "
        f"dtype='bfloat16' saves the casts and {size / 2e9:.1f} GB."
    )


def checkpointing_can_be_off(model: Any, args: PackedSFTConfig, tokens: int, has: float) -> str | None:
    """That a GPU of so many bytes holds micro-batches of so many tokens without gradient checkpointing, `None` if it
    is off, does not fit, or cannot be told: DeepSpeed and FSDP share weights out."""
    shared = bool(args.deepspeed) or bool(args.fsdp)
    if not args.gradient_checkpointing or shared:
        return None
    try:
        shape = shape_as_loaded(model)
    except (AttributeError, RuntimeError, TypeError) as error:  # widths that no config says, or each layer's own
        logger.debug("trl-packfa: no estimate of memory: %s", error)
        return None
    fused_norms = args.fused_kernels and liger_kernels() is not None
    memory = estimate(shape, without_checkpointing(args), tokens, fused_norms=fused_norms)
    if memory.needed > has:
        return None
    return (
        f"gradient checkpointing can be off: est. {memory.needed / 1e9:.1f} GB of {has / 1e9:.1f} GB at "
        f"{tokens:,} tokens. gradient_checkpointing=False computes {operations(bool(shape.lora_rank))}."
    )


def operations(frozen: bool) -> str:
    """What gradient checkpointing costs, in operations by weight and token: the forward again."""
    return "4 operations a weight and token instead of 6" if frozen else "6 operations a weight and token instead of 8"
