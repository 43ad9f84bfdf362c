"""Memory of this process: its peak, and memory that it no longer needs."""

from __future__ import annotations

import ctypes
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


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library can.

    glibc keeps small pieces that were freed, and large tensors get new memory beside them. Without this, a process
    that checked an encoder of 90 MB kept 150 MB more.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
