"""What accelerators multiply at most, as their makers' data sheets say: half precision, dense, no boost by sparsity.

Where a data sheet gives figures "with sparsity", half of them stand here.
"""

from __future__ import annotations

import torch

from .autocast import HALF

# Parts of a device's name, lower case, and TFLOP/s; the first entry all of whose parts are in the name counts.
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
# A device of such a name is a slice of one, or another one.
_OTHERS = ("mig", "max-q", "laptop")


def datasheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second of `device` in `dtype` at most, by its name; `None` where no data sheet is known here, and
    in float32 and float64, whose rate depends on switches (tf32)."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    return named_flops(torch.cuda.get_device_name(device))


def named_flops(name: str) -> float | None:
    """The same by a name as `torch.cuda.get_device_name` gives it.

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
    """`A100-SXM4-80GB` is an A100, and an L40 no L4."""
    return any(word == part or word.startswith(part + "-") or word.endswith("-" + part) for word in words)
