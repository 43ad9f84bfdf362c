"""Peak memory of this process: on the GPU if there is one, else resident memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from ..runtime.memory import resident_peak


def reset_resident_peak() -> None:
    """Restart the count of the peak if the system can do so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class PeakMemory:
    """Peak bytes of the steps alone, the bytes before them, and the peak of the whole process."""

    def __init__(self) -> None:
        self.before, self.life = 0, 0

    def reset(self) -> None:
        """Start to count the peak of the steps."""
        self.life = self._now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        reset_resident_peak()
        self.before = self._now()

    def peak(self) -> int:
        """Return the peak bytes since [`reset`], or of the whole process if the system cannot reset the count."""
        peak = self._now()
        self.life = max(self.life, peak)
        return peak

    @staticmethod
    def _now() -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_peak()
