"""A worker process as the one who measures sees it: started, told, listened to, and read when it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .worker import FINISH, STEP, TRACE

# Large tensors from the heap, where they are reused, on every side: else page faults drown the arithmetic of a CPU.
HEAP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
_LAST_LINES = 5


class SideFailed(Exception):
    """A side that cannot be measured; its message is the reason."""


class SideProcess:
    """One side's worker.

    Args:
        spec (`dict`): what the worker reads.
        folder (`Path`): where the spec and the worker's output go.
        number (`int`): tells the files of the sides apart.
    """

    def __init__(self, spec: dict[str, Any], folder: Path, number: int) -> None:
        path, self._log = folder / f"side{number}.json", folder / f"side{number}.log"
        path.write_text(json.dumps(spec), encoding="utf-8")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trl_packfa.bench.worker", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**HEAP, **os.environ},
            )

    def ready(self) -> dict[str, Any]:
        """Wait until it is built."""
        return self._receive()

    def step(self) -> dict[str, Any] | None:
        """Run one optimizer step; `None` when its epochs are over."""
        self._send(STEP)
        event = self._receive()
        return None if event["event"] == "ended" else event

    def trace(self) -> dict[str, Any]:
        """Run one optimizer step under the profiler; empty when its epochs are over."""
        self._send(TRACE)
        event = self._receive()
        return {} if event["event"] == "ended" else event

    def finish(self) -> dict[str, Any]:
        """Evaluate and end."""
        self._send(FINISH)
        return self._receive()

    def close(self) -> None:
        """End it, however it is."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SideFailed(self._epitaph()) from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(self._epitaph())
        event = json.loads(line)
        if event["event"] == "failed":
            raise SideFailed(event["reason"])
        return event

    def _epitaph(self) -> str:
        """Why a process is gone that said nothing."""
        code = self._process.wait()
        if code in (-9, 137):
            return "killed by the system, most likely for its memory"
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"died with exit code {code}: " + " | ".join(lines)
