"""The manifest of a checkpoint: sizes and digests of its files. It shows whether a checkpoint is whole.

It is written after all other files and read before them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

MANIFEST = "packing_manifest.json"
# Files up to this size, in bytes, are compared by their contents too. The digest of a larger file takes seconds.
_DIGESTED = 2**30
# Bytes that are read at a time.
_CHUNK = 2**22
# A resumed run does not read it, and a user may edit it.
_LEFT_OUT = ".md"
_PARTIAL = ".partial"


def write_manifest(folder: Path) -> None:
    """Write the size and digest of every file of a checkpoint, once all ranks have written their files.

    Files in subfolders (parts of sharded weights and optimizers) are included.
    """
    found = {str(path.relative_to(folder)): _described(path) for path in _files(folder)}
    write_json(folder / MANIFEST, {"files": found})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all. A run that is killed meanwhile leaves the old file, or none."""
    # In the same folder, because `os.replace` is atomic only within one file system.
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def damage(folder: Path) -> str | None:
    """Describe the first file of a checkpoint that is missing or has changed; return `None` if there is none.

    A checkpoint without a manifest (from an earlier version, or another trainer) cannot be checked; it gives `None`.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"a {MANIFEST} that cannot be read: {error!r}"
    for name, written in files:
        file = folder / name
        if not file.is_file():
            return f"no {name}"
        if (size := file.stat().st_size) != written["bytes"]:
            return f"{size:,} of the {written['bytes']:,} bytes of {name}"
        if "sha256" in written and _digest(file) != written["sha256"]:
            return f"other contents in {name} than were written"
    return None


def left_out(folder: Path) -> str | None:
    """Describe state that a checkpoint does not hold and a resumed run needs; return `None` if it holds all.

    The Trainer starts with new state for missing parts, without a warning.
    """
    names = [path.name for path in folder.iterdir()]
    # DeepSpeed keeps optimizer and schedule together, in a folder by step.
    by_engine = any(name.startswith("global_step") for name in names)
    stem = OPTIMIZER_NAME.split(".")[0]  # `optimizer.pt`, `optimizer.bin`, or folders `optimizer_0` of FSDP
    if not by_engine and not (SCHEDULER_NAME in names and any(name.startswith(stem) for name in names)):
        return f"optimizer and schedule ({OPTIMIZER_NAME}, {SCHEDULER_NAME})"
    if not any(name.startswith("rng_state") for name in names):
        return "the states of the random generators (rng_state.pth)"
    return None


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST and path.suffix not in (_LEFT_OUT, _PARTIAL):
            yield path


def _described(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"bytes": size, "sha256": _digest(path)} if size <= _DIGESTED else {"bytes": size}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
