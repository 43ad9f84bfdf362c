"""Control of a worker process: start it, send commands, receive events, and read its log if it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

# Every side allocates large tensors on the heap, which reuses memory. Otherwise page faults dominate CPU time.
HEAP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
_LAST_LINES = 5


class SideFailed(Exception):
    """Error for a side that cannot be measured; its message is the reason."""


class SideProcess:
    """Worker process of one side.

    Args:
        spec (`dict`): specification that the worker reads.
        folder (`Path`): folder for the spec and the worker's output.
        number (`int`): number in the file names of this side.
    """

    # Python's arguments; `benchmarks/arithmetic_bound.py` has a worker that knows more strategies.
    worker: ClassVar[tuple[str, ...]] = ("-m", "trl_packfa.bench.worker")

    def __init__(self, spec: dict[str, Any], folder: Path, number: int) -> None:
        path, self._log = folder / f"side{number}.json", folder / f"side{number}.log"
        path.write_text(json.dumps(spec), encoding="utf-8")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.worker, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**HEAP, **os.environ},
            )

    def ready(self) -> dict[str, Any]:
        """Wait until the trainer is built and return its facts."""
        return self._receive()

    def ask(self, command: str) -> dict[str, Any] | None:
        """Send a command (`STEP`, `TRACE`, `FINISH`) and return the worker's figures; `None` if no step is left."""
        self._send(command)
        event = self._receive()
        return None if event["event"] == "ended" else event

    def close(self) -> None:
        """End the process in any state."""
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
        """Return the reason why a process ended without an event."""
        code = self._process.wait()
        if code in (-9, 137):
            return "killed by the system, most likely for its memory"
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"died with exit code {code}: " + " | ".join(lines)
