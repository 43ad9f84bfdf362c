"""Peak memory of this process, on its device."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def resident_peak() -> int:
    """Return the peak resident bytes of this process since its start or the last reset of the system's count."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory(device: torch.device) -> float:
    """Return the peak bytes on a device: those that torch has allocated there, or resident bytes on a CPU."""
    # torch has a module of this name for each kind of accelerator.
    return float(resident_peak() if device.type == "cpu" else getattr(torch, device.type).max_memory_allocated(device))
