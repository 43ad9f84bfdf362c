"""Files of a checkpoint: reports, progress and stream state, and the manifest, which shows whether it is whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ...errors import CheckpointNotWritten, InvalidConfig
from ...override import set_inside

logger = logging.getLogger(__name__)

# Written when every rank has written its part.
PACKING_REPORT = "packing_report.json"
# The state that a resumed run needs and the Trainer does not save.
PROGRESS = "packing_progress.json"


def last_whole_checkpoint(folder: str | Path | None) -> str | None:
    """Find the newest whole `checkpoint-*` of a folder, with a warning for skipped ones; `None` if there is none."""
    steps = {path.name.removeprefix("checkpoint-"): path for path in Path(folder or ".").glob("checkpoint-*")}
    for step in sorted(filter(str.isdigit, steps), key=int, reverse=True):
        path = steps[step]
        if (wrong := _incomplete(path)) is None:
            return str(path)
        logger.warning("trl-packfa: %s is incomplete (%s): skipped.", path, wrong)
    return None


def _incomplete(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not whole, or `None`. One of an earlier version has a report without a manifest."""
    written = (checkpoint / MANIFEST).exists() or (checkpoint / PACKING_REPORT).exists()
    return damage(checkpoint) if written else f"no {PACKING_REPORT}"


def _saved_state(checkpoint: str | Path) -> dict[str, Any]:
    """Read the Trainer's state of a checkpoint."""
    path = Path(checkpoint) / TRAINER_STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {**state, "global_step": int(state["global_step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error!r}.", do="Resume from another checkpoint.") from error


def resuming_message(checkpoint: str | Path) -> str:
    """Say from which checkpoint and optimizer step a run resumes."""
    return f"resuming from {Path(checkpoint).name} at step {_saved_state(checkpoint)['global_step']}"


def finished_message(checkpoint: str | Path, args: TrainingArguments) -> str | None:
    """Say that the run of a checkpoint has taken all steps that the arguments ask for; `None` if some are left."""
    state = _saved_state(checkpoint)
    step, epoch = state["global_step"], float(state.get("epoch") or 0.0)
    if step < args.max_steps or (args.max_steps <= 0 and epoch < args.num_train_epochs):
        return None
    asked = f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    return (
        f"already finished: {Path(checkpoint).name} is at step {step}, epoch {epoch:g}, and {asked}. Nothing is left "
        "to train. Raise it to go on."
    )


def checkpoint_to_resume(asked: str | bool | None, folder: str | Path | None, *, whole: bool = True) -> str | None:
    """Return the folder of the checkpoint that `resume_from_checkpoint` asks for, or `None` if it asks for none.

    `True`, `"true"` and `"last"` mean the last whole checkpoint in `folder`. With `whole=False`, for a trainer whose
    checkpoints do not record that they are whole, they mean the last one.
    """
    word = str(asked or "").lower()
    if word in ("", "false", "none"):
        return None
    if word in ("true", "last"):
        found = (None if whole else get_last_checkpoint(str(folder))) or last_whole_checkpoint(folder)
        if found is None:
            partial = sorted(Path(folder or ".").glob("checkpoint-*"))
            raise InvalidConfig(
                f"no whole checkpoint to resume from in {folder}.",
                why=[f"{path.name} has {_incomplete(path)}" for path in partial] or ["it holds none"],
                do="Train without resume_from_checkpoint, or name a checkpoint's folder.",
            )
        return found
    checkpoint = Path(str(asked))
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise InvalidConfig(
            f"resume_from_checkpoint={asked}: that is no checkpoint.",
            why=[f"the folder has no {TRAINER_STATE_NAME}" if checkpoint.is_dir() else "no such folder"],
            do=f"Name the folder of a checkpoint, or pass 'last' for the last whole one in {folder}.",
        )
    if (wrong := damage(checkpoint)) is not None:
        raise InvalidConfig(
            f"the checkpoint {checkpoint} is damaged: it has {wrong}.",
            why=[f"{MANIFEST} lists the files as they were written"],
            do="Resume from another one: resume_from_checkpoint='last' takes the newest that is whole.",
        )
    return str(asked)


def tell_left_out(checkpoint: str | Path) -> None:
    """Warn about state that a checkpoint lacks, which would silently start anew, and about unchecked files."""
    folder = Path(checkpoint)
    names = [path.name for path in folder.iterdir()]
    if MANIFEST not in names:
        logger.warning("trl-packfa: %s has no %s: its files are not checked.", folder, MANIFEST)
    # DeepSpeed keeps optimizer and schedule together, in a folder by step.
    by_engine = any(name.startswith("global_step") for name in names)
    stem = OPTIMIZER_NAME.split(".")[0]  # `optimizer.pt`, `optimizer.bin`, or folders `optimizer_0` of FSDP
    if not by_engine and not (SCHEDULER_NAME in names and any(name.startswith(stem) for name in names)):
        lacks = f"optimizer and schedule ({OPTIMIZER_NAME}, {SCHEDULER_NAME})"
    elif not any(name.startswith("rng_state") for name in names):
        lacks = "the states of the random generators (rng_state.pth)"
    else:
        return
    logger.warning("trl-packfa: %s does not hold %s: the resumed run starts with new ones.", folder, lacks)


@contextmanager
def whole_checkpoint(folder: Path, trainer: Any) -> Iterator[None]:
    """Mark a checkpoint as whole, and delete older ones, after the `with` block has written every rank's part.

    Raises:
        [`CheckpointNotWritten`]: for example if the disk is full. The parts of a new checkpoint are deleted.
    """
    is_new = not folder.exists()
    args, limit = trainer.args, trainer.args.save_total_limit
    try:
        if args.should_save:
            for name in (MANIFEST, PACKING_REPORT):
                (folder / name).unlink(missing_ok=True)
        trainer.accelerator.wait_for_everyone()
        # The Trainer would delete older checkpoints on rank 0 while other ranks may still write. A run that is killed
        # then would have no whole checkpoint left. Without a limit the Trainer deletes none.
        with set_inside(args, save_total_limit=None):
            yield
        trainer.accelerator.wait_for_everyone()
        if not args.should_save:
            return
        if limit is not None and (folder / TRAINING_ARGS_NAME).exists():
            torch.save(args, folder / TRAINING_ARGS_NAME)  # the Trainer has saved them without the limit
        trainer.save_reports(folder)
        write_manifest(folder)
        best = trainer.state.best_model_checkpoint
        rotate_checkpoints(str(folder.parent), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        full = any(words in str(error).lower() for words in _FULL)
        if not full and getattr(error, "errno", None) not in _FULL_NUMBERS:
            raise
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        # With several ranks, others may still be writing. Then the parts stay, without a manifest.
        if is_new and trainer.accelerator.num_processes == 1:
            shutil.rmtree(folder, ignore_errors=True)
        first_line = str(error).partition("\n")[0]
        raise CheckpointNotWritten(
            f"{folder} could not be written: {first_line.rstrip('.')}.",
            why=[f"{free / 1e6:,.0f} MB were free there"],
            do="Free some space, lower save_total_limit or name another output_dir. Earlier checkpoints are whole: "
            "resume from the last with resume_from_checkpoint='last'.",
        ) from error


# Words in errors of torch's and safetensors' writers when the operating system accepts no more bytes.
_FULL = ("no space left", "disk quota exceeded", "file too large", "file write failed", "unexpected pos")
_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_progress(folder: str | Path) -> dict[str, Any]:
    """Read a checkpoint's progress; return an empty dict for a checkpoint of another trainer."""
    path = Path(folder) / PROGRESS
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise InvalidConfig(
            f"{path} is corrupt: {error}.", do="Resume from another checkpoint, or remove the file to count from 0."
        ) from error
    return found if isinstance(found, dict) else {}


# Sizes and digests of the files. It is written after all others, and read before them.
MANIFEST = "packing_manifest.json"
# Files up to this size, in bytes, are compared by their contents too. The digest of a larger file takes seconds.
_DIGESTED = 2**30
# A resumed run does not read it, and a user may edit it.
_LEFT_OUT = ".md"
_PARTIAL = ".partial"


def write_manifest(folder: Path) -> None:
    """Write the size and digest of every file of a checkpoint, once all ranks have written their files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST and path.suffix not in (_LEFT_OUT, _PARTIAL):
            size = path.stat().st_size
            digest = {"sha256": _digest(path)} if size <= _DIGESTED else {}
            found[str(path.relative_to(folder))] = {"bytes": size, **digest}
    write_json(folder / MANIFEST, {"files": found})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all. A run that is killed meanwhile leaves the old file, or none."""
    # In the same folder, because `os.replace` is atomic only within one file system.
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def damage(folder: Path) -> str | None:
    """Describe the first file of a checkpoint that is not as in its manifest; `None` if all are, or without one."""
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()
