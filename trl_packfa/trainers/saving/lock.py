"""The lock of a run's folder: one run at a time writes checkpoints into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from ...errors import InvalidConfig
from ...parallel.ranks import agree

# With an underscore, because transformers leaves such files out when it uploads the folder.
LOCK = "_training.lock"


@contextmanager
def only_run_in(folder: str | Path | None, accelerator: Accelerator | None = None) -> Iterator[None]:
    """Lock a folder inside a `with` block, so that no other process trains into it; `None` locks nothing.

    Every rank calls this, and all raise if one of them finds its folder locked: the others would wait for it.
    """
    lock: FileLock | None = None

    def acquire() -> None:
        nonlocal lock
        lock = None if folder is None else _locked(folder)

    try:
        if accelerator is None:
            acquire()
        else:
            agree(accelerator, acquire)
        yield
    finally:
        if lock is not None:
            # Before the release, so that no other process holds it yet. Windows deletes no open file: there the
            # release does.
            with suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def _locked(folder: str | Path) -> FileLock:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(folder) / LOCK, timeout=0)
        lock.acquire()
        return lock
    except Timeout as error:
        raise InvalidConfig(
            f"another run is training into {folder}.",
            why=["both would write, and remove, the same checkpoints"],
            do="Give this run another output_dir, or end the other one.",
        ) from error
    except OSError as error:
        raise InvalidConfig(
            f"output_dir {folder} cannot be written to: {error.strerror or error}.",
            do="Name a folder that can be written to, or pass save_strategy='no'.",
        ) from error
