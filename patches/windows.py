"""PhiMoE and Qwen2-MoE: attention through the interface, which is not told of the sliding window."""

from __future__ import annotations

from typing import Any

from trl_packfa.patches.base import Patch


def sliding_window(module: Any) -> int | None:
    """Qwen2-MoE's modules know their own; PhiMoE's layers share one."""
    # Its full layers have no attribute. PhiMoE's masks are all of the config's window.
    if type(module).__name__ == "Qwen2MoeAttention":
        return getattr(module, "sliding_window", None)
    return module.config.sliding_window


PATCH = Patch(model_types=("phimoe", "qwen2_moe"), window=sliding_window)
