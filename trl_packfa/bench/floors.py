"""What arithmetic and memory alone would take: the floor under a step and under one attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from trl import get_peft_config

from ..config import PackedSFTConfig

# Rows of the measured product: what a full micro-batch has.
_ROWS = 2048
_SECONDS = 0.5
_COPIED_BYTES = 2**28


def model_flops_per_token(config: PreTrainedConfig, args: PackedSFTConfig, seen: float) -> float:
    """Floating point operations that a training step needs per true token, recomputation not counted.

    2 per weight forward and 2 for the gradient of its input; 2 more for its own gradient where it trains. Attention:
    per layer and token that a token sees, half of the document on average, 4 times its width, and twice that backward.

    Args:
        config (`PreTrainedConfig`): the model.
        args ([`PackedSFTConfig`]): says whether an adapter trains, and which.
        seen (`float`): mean over tokens of the length of their document.
    """
    text: Any = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights, adapter = _active_weights(model, text), 0
    if args.use_peft:
        adapter = _adapter_weights(model, args)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    attention = 3 * 2 * width * seen * text.num_hidden_layers
    return (4 if args.use_peft else 6) * weights + 6 * adapter + attention


def _active_weights(model: nn.Module, text: Any) -> float:
    """Weights that a token is multiplied with: linear layers, the head, and its share of the experts."""
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    return linear + (stacked * text.num_experts_per_tok / experts if experts and stacked else 0)


def _adapter_weights(model: nn.Module, args: PackedSFTConfig) -> int:
    """Weights of LoRA's factors, as PEFT would put them on."""
    from peft import get_peft_model

    config: Any = get_peft_config(args)
    wrapped = get_peft_model(model, config)  # type: ignore[arg-type]
    return sum(p.numel() for name, p in wrapped.named_parameters() if "lora_" in name)


def peak_flops(config: PreTrainedConfig, args: PackedSFTConfig, *, given: float | None = None) -> float:
    """Operations per second of the model's own largest matrix product, or what the user says the machine can do."""
    if given is not None:
        return given * 1e12
    text: Any = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return matmul_flops(_ROWS, text.hidden_size, wide, dtype=compute_dtype(args))


def compute_dtype(args: PackedSFTConfig) -> torch.dtype:
    """What matrix products run in."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return getattr(torch, args.dtype) if args.dtype not in (None, "auto") else torch.float32


def matmul_flops(rows: int, inner: int, columns: int, *, dtype: torch.dtype) -> float:
    """The best rate of `(rows, inner) @ (inner, columns)` on this machine, in operations per second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    return 2 * rows * inner * columns / _best(lambda: a @ b)


def bandwidth() -> float:
    """Bytes per second that memory reads and writes in a large copy."""
    source = torch.empty(_COPIED_BYTES // 4, device="cuda" if torch.cuda.is_available() else "cpu").normal_()
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _best(lambda: target.copy_(source))


def _best(act: Callable[[], Any]) -> float:
    """Seconds of the fastest of as many calls as fit half a second, at least three."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < _SECONDS:
        start = time.perf_counter()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
