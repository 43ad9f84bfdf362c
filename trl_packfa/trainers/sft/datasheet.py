"""Peak rates of accelerators from their makers' data sheets: dense half-precision products, without sparsity.

If a data sheet gives figures "with sparsity", half of them stand here.
"""

from __future__ import annotations

import torch

from ...autocast import HALF

# Parts of a device's name in lower case, and TFLOP/s. The first entry counts whose parts are all in the name.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("b200",), 2250.0),
    (("h200", "nvl"), 835.0),
    (("h200",), 989.0),
    (("h100", "pcie"), 756.0),
    (("h100", "nvl"), 835.0),
    (("h100",), 989.0),
    (("a100",), 312.0),
    (("a800",), 312.0),
    (("l40s",), 362.0),
    (("l4",), 121.0),
    (("a10g",), 70.0),
    (("mi300x",), 1307.4),
)
# A device with such a word in its name is a slice of the listed device, or another device.
_OTHERS = ("mig", "max-q", "laptop")


def datasheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of `device` in `dtype`, by the device's name.

    It is `None` if no data sheet is listed here, and for float32 and float64, whose rate depends on switches (tf32).
    """
    if device.type != "cuda" or dtype not in HALF:
        return None
    return named_flops(torch.cuda.get_device_name(device))


def named_flops(name: str) -> float | None:
    """Return the peak operations per second in half precision of a device with this `torch.cuda.get_device_name`.

    ```python
    >>> named_flops("NVIDIA H100 80GB HBM3") / 1e12
    989.0
    >>> named_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    True
    ```
    """
    words = name.lower().replace("_", " ").split()
    if any(_has(words, other) for other in _OTHERS):
        return None
    peak = next((peak for parts, peak in _PEAKS if all(_has(words, part) for part in parts)), None)
    return None if peak is None else peak * 1e12


def _has(words: list[str], part: str) -> bool:
    """Tell whether a device's name has this part as a word: `A100-SXM4-80GB` is an A100, but an L40 is not an L4."""
    return any(word == part or word.startswith(part + "-") or word.endswith("-" + part) for word in words)
