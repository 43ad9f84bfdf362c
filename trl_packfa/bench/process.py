"""Control of a worker process: start it, send commands, receive answers, and read its log if it dies."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment

from . import worker
from .environment import HEAP

_LAST_LINES = 5
# Seconds in which a process may end by itself.
_PATIENCE = 10.0


class SideProcess:
    """Worker process of one side.

    Args:
        spec (`dict`): specification that the worker reads.
        log (`Path`): file for the worker's output.
    """

    def __init__(self, spec: dict[str, Any], log: Path) -> None:
        spawn, self._log = get_context("spawn"), log
        self._channel, theirs = spawn.Pipe()
        self._process = spawn.Process(target=worker.main, args=(spec, theirs, log))
        # The allocator reads these when the process starts.
        with patch_environment(**{name: value for name, value in HEAP.items() if name not in os.environ}):
            self._process.start()
        theirs.close()  # with two ends open here, the death of the worker would not end a wait

    def ask(self, command: str) -> dict[str, Any] | None:
        """Send a command (`STEP`, `TRACE`, `FINISH`) and return the worker's figures; `None` if no step is left."""
        try:
            self._channel.send(command)
        except OSError as error:
            raise worker.SideFailed(self._epitaph()) from error
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer; the first one has the facts of the built trainer.

        Raises:
            [`SideFailed`]: if the worker says so, or has died.
        """
        try:
            answer = self._channel.recv()
        except (EOFError, OSError) as error:
            raise worker.SideFailed(self._epitaph()) from error
        if isinstance(answer, worker.SideFailed):
            raise answer
        return answer

    def close(self) -> None:
        """End the process in any state. One that waits for a command ends by itself, and cleans up."""
        self._channel.close()
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _epitaph(self) -> str:
        """Return the reason why a process ended without an answer."""
        self._process.join()
        code = self._process.exitcode
        if code in (-9, 137):
            return "killed by the system, most likely for its memory"
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:] if self._log.exists() else []
        return f"died with exit code {code}: " + " | ".join(lines)
