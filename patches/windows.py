"""PhiMoE and Qwen2-MoE, which do not pass their sliding window to transformers' attention interface."""

from __future__ import annotations

from typing import Any

from trl_packfa.patches.base import InterfacePatch


def sliding_window(module: Any) -> int | None:
    """Return the window in tokens: of the module for Qwen2-MoE, of the config for PhiMoE."""
    # Full layers of Qwen2-MoE have no such attribute. All masks of PhiMoE use the config's window.
    if type(module).__name__ == "Qwen2MoeAttention":
        return getattr(module, "sliding_window", None)
    return module.config.sliding_window


PATCH = InterfacePatch(model_types=("phimoe", "qwen2_moe"), window=sliding_window)
