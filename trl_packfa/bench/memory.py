"""The peak memory of this process: on the device where there is one, else resident."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def resident_peak() -> int:
    """Peak resident bytes of this process, since its start or the last [`reset_resident_peak`]."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    # Linux and macOS count in different units.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_resident_peak() -> bool:
    """Count the peak from here on; `False` where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class PeakMemory:
    """Peak bytes of the steps alone, beside what was there before and the peak of the whole life."""

    def __init__(self) -> None:
        self.before, self.life = 0, 0

    def reset(self) -> None:
        """The steps begin."""
        self.life = self._now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        reset_resident_peak()
        self.before = self._now()

    def peak(self) -> int:
        """Peak bytes since [`reset`]; where that is not possible, of the whole life."""
        peak = self._now()
        self.life = max(self.life, peak)
        return peak

    @staticmethod
    def _now() -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak()


def available_memory() -> int:
    """Bytes that are free: on the device where there is one, else of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    path = Path("/proc/meminfo")
    if path.exists():
        line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
