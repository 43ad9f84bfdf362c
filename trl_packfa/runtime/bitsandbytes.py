"""Keeping bitsandbytes' 4-bit weights trainable on a CPU.

On a CPU with AVX512-BF16, the first evaluation without gradients turns a `Linear4bit`'s weights into a layout whose
product has no backward (bitsandbytes 0.50.2, `Linear4bit.forward`): training goes on afterwards, with gradients that
are silently wrong, measured at 100 % error in the first layers. A patched model is one that trains, so the patch
switches the conversion off for it; measurements on a model that is not patched yet switch it off while they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import UnsupportedModel

# bitsandbytes' own switch, set per module when it is built.
SWITCH = "support_avx512bf16_for_cpu"


def convertible_modules(model: nn.Module) -> list[nn.Module]:
    """The 4-bit layers that would be converted at the first evaluation.

    Raises:
        [`UnsupportedModel`]: if some have been converted already.
    """
    found = [(name, module) for name, module in model.named_modules() if getattr(module, SWITCH, False)]
    for name, module in found:
        # bitsandbytes marks converted weights in their quantization state. The switch alone does not tell: it stays on
        # after the conversion.
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(quant_state, "packing_format_for_cpu", False):
            raise UnsupportedModel(
                f"the 4-bit weights of '{name}' are in bitsandbytes' inference-only CPU layout.",
                why=["the model was evaluated on a CPU before it was patched; its gradients would be wrong"],
                do="Load the model again and patch it (or build the trainer) before the first evaluation.",
            )
    return [module for _, module in found]


@contextmanager
def unconverted(model: nn.Module) -> Iterator[None]:
    """For the length of a `with` block no 4-bit layer is converted."""
    modules = convertible_modules(model)
    try:
        for module in modules:
            setattr(module, SWITCH, False)
        yield
    finally:
        # All of them had the switch on: `convertible_modules` returns no others.
        for module in modules:
            setattr(module, SWITCH, True)
