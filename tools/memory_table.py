"""Print the table of GPU memory by model and method: `python tools/memory_table.py`. It is an estimate, not measured.

Llama's shapes, micro-batches of 8,192 tokens, bfloat16 (full fine-tuning: float32 weights under autocast), AdamW, LoRA
of rank 16 on all linear layers; the estimate is that of `trl_packfa/plan/memory.py`, with its slack.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trl_packfa import PackedSFTConfig
from trl_packfa.bench.presets import preset_config
from trl_packfa.plan.memory import estimate, shape_of

TOKENS = 8192
MODELS = {"1 B": "llama-3.2-1b", "3 B": "llama-3.2-3b", "8 B": "llama-3-8b"}
METHODS: dict[str, dict[str, Any]] = {
    "QLoRA": {"load_in_4bit": True, "dtype": "bfloat16"},
    "LoRA": {"dtype": "bfloat16"},
    "full": {"use_peft": False},
}


def gigabytes(model: str, *, checkpointing: bool, **options: Any) -> float:
    """Return the estimate in GB for a preset and the options of a config."""
    args = PackedSFTConfig(
        "out", use_cpu=True, bf16=True, lora_dropout=0.0, gradient_checkpointing=checkpointing, **options
    )
    with torch.device("meta"):
        shape = shape_of(AutoModelForCausalLM.from_config(preset_config(model)), args)
    assert shape is not None, "Llama has all sizes"
    return estimate(shape, args, TOKENS, fused_norms=True).needed / 1e9


def table() -> str:
    """Return the table in Markdown: with activation checkpointing, TRL's default, and without."""
    lines = ["| Llama | " + " | ".join(METHODS) + " |", "|---|" + "---:|" * len(METHODS)]
    for name, preset in MODELS.items():
        cells = [
            " / ".join(f"{gigabytes(preset, checkpointing=on, **options):.0f}" for on in (True, False))
            for options in METHODS.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
