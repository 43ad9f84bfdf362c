"""Advice before a run on what would make it faster on this GPU. It changes nothing.

It finds activation checkpointing that could be off, and frozen weights that every pass casts.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset

from ...kernels.liger import liger_kernels
from ..common.batching import FREE, Batching
from ..common.dataset import read_lengths
from .config import PackedSFTConfig
from .memory import estimate, without_checkpointing
from .model_shape import shape_as_loaded

logger = get_logger(__name__)

# Frozen weights of fewer bytes are not mentioned.
_FEW_BYTES = 100e6


def tell_what_fits(model: Any, args: PackedSFTConfig, dataset: Any, *, cut: str = FREE) -> None:
    """Log what a run on these cut documents could save. `cut` is how `step` may cut."""
    if (line := frozen_in_float32(model, args)) is not None:
        logger.info("trl-packfa: %s", line)
    has = memory_of(args.device)
    if has is None or dataset is None or isinstance(dataset, IterableDataset):
        return
    tokens = Batching.of(args, cut=cut).micro_batch_tokens(read_lengths(dataset))
    if (line := checkpointing_can_be_off(model, args, tokens, has)) is not None:
        logger.info("trl-packfa: %s", line)


def memory_of(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes, or `None` for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def frozen_in_float32(model: Any, args: PackedSFTConfig) -> str | None:
    """Describe the cost of frozen float32 weights under `bf16`; return `None` if there are few or none."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype is torch.float32]
    size = sum(p.numel() * p.element_size() for p in frozen)
    if not args.bf16 or size < _FEW_BYTES:
        return None
    return (
        f"the frozen weights are float32 (TRL's default), {size / 1e9:.1f} GB that every pass casts to bfloat16: "
        f"dtype='bfloat16' saves the casts and {size / 2e9:.1f} GB."
    )


def checkpointing_can_be_off(model: Any, args: PackedSFTConfig, tokens: int, has: float) -> str | None:
    """Say that a GPU with `has` bytes can train micro-batches of so many tokens without activation checkpointing.

    The result is `None` if checkpointing is off, if the memory does not suffice, or if that cannot be estimated, as
    with the sharded weights of DeepSpeed and FSDP.
    """
    shared = bool(args.deepspeed) or bool(args.fsdp)
    if not args.gradient_checkpointing or shared:
        return None
    try:
        shape = shape_as_loaded(model)
    except (AttributeError, RuntimeError, TypeError) as error:  # the config has no widths, or one for each layer
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
    """Describe the operations that training saves without activation checkpointing, which repeats the forward."""
    return "4 operations a weight and token instead of 6" if frozen else "6 operations a weight and token instead of 8"
