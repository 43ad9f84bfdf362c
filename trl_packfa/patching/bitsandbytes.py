"""Keep bitsandbytes' 4-bit weights trainable on a CPU.

On a CPU with AVX512-BF16, the first evaluation without gradients converts a `Linear4bit`'s weights to a layout whose
product has no backward (bitsandbytes 0.50.2, `Linear4bit.forward`). Training continues afterwards, but gradients are
wrong without an error; the measured error was 100 % in the first layers. A patched model is meant for training, so the
patch switches the conversion off. Measurements on a model without a patch switch it off while they run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ..errors import UnsupportedModel
from ..override import attributes_set

# bitsandbytes' own switch, set per module when it is built.
SWITCH = "support_avx512bf16_for_cpu"


def conversion_edits(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    """Return the edits that keep 4-bit layers as they are; raise [`UnsupportedModel`] if one has been converted."""
    found = [(name, module) for name, module in model.named_modules() if getattr(module, SWITCH, False)]
    for name, module in found:
        # bitsandbytes marks converted weights in their quantization state. The switch does not show it: it stays on
        # after the conversion.
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(quant_state, "packing_format_for_cpu", False):
            raise UnsupportedModel(
                f"the 4-bit weights of '{name}' are in bitsandbytes' inference-only CPU layout.",
                why=["the model was evaluated on a CPU before it was patched; its gradients would be wrong"],
                do="Load the model again and patch it (or build the trainer) before the first evaluation.",
            )
    return [(module, SWITCH, False) for _, module in found]


def unconverted(model: nn.Module) -> AbstractContextManager[None]:
    """Keep 4-bit layers from being converted inside a `with` block."""
    return attributes_set(conversion_edits(model))
