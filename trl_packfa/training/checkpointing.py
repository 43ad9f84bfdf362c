"""What a run says about itself: metrics of each batch, reports beside each checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints

from ..collator import LOSSES
from ..errors import InvalidConfig
from ..exactness import ExactnessReport
from ..packing import PackingReport
from .config import PackedSFTConfig

logger = logging.getLogger(__name__)

# Written last: a checkpoint that has it is whole.
PACKING_REPORT = "packing_report.json"
_PROGRESS = "packing_progress.json"
_LOST = ("truncated", "split", "dropped", "tokens_lost")


def count_batch(metrics: Mapping[str, list[float]], inputs: dict[str, Any], *, capacity: int | None) -> None:
    """Add what a packed batch holds to the Trainer's metrics, and take out of `inputs` what is no model input.

    Args:
        metrics (`Mapping[str, list[float]]`):
            TRL's metrics of the current mode; averaged when logged.
        inputs (`dict[str, Any]`):
            The batch.
        capacity (`int` or `None`):
            Tokens that the batch has room for, where rows have a fixed length; logs `fill`.
    """
    lost = inputs.pop(LOSSES, None)
    layout = inputs.get("packed_layout")
    if layout is not None:
        # The last document is padding, which nobody wrote.
        lengths = layout.lengths[:-1] if layout.padding else layout.lengths
        metrics["documents"].append(len(lengths))
        metrics["longest_document"].append(max(lengths, default=0))
        if capacity:
            metrics["fill"].append(sum(lengths) / capacity)
    if lost is not None:
        for name, count in zip(_LOST, lost, strict=True):
            metrics[name].append(count)


def last_whole_checkpoint(folder: str | Path | None) -> str | None:
    """The newest `checkpoint-*` in a folder that was written whole, which its report, written last, says; `None` if
    there is none. Others are named in the log and passed over."""
    found = [
        path for path in Path(folder or ".").glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()
    ]
    for path in sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
        if (path / PACKING_REPORT).exists():
            return str(path)
        logger.warning("trl-packfa: %s is incomplete (no %s): passed over.", path, PACKING_REPORT)
    return None


def require_whole_checkpoint(folder: str | Path | None) -> str:
    """[`last_whole_checkpoint`], which must exist.

    Raises:
        [`InvalidConfig`]: naming those that were not written whole.
    """
    found = last_whole_checkpoint(folder)
    if found is None:
        partial = sorted(path.name for path in Path(folder or ".").glob("checkpoint-*"))
        raise InvalidConfig(
            f"no whole checkpoint to resume from in {folder}.",
            why=[f"{name} has no {PACKING_REPORT}, which is written last" for name in partial] or ["it holds none"],
            do="Train without resume_from_checkpoint, or name a checkpoint's folder.",
        )
    return found


@contextmanager
def whole_checkpoint(folder: Path, trainer: Any) -> Iterator[None]:
    """Around the writing of a checkpoint: it has its report, which says that it is whole, only once every rank has
    written its part, and older checkpoints are deleted only after that.

    Args:
        folder (`Path`):
            Of the checkpoint; one that is written again is taken for half-written meanwhile.
        trainer (`Trainer`):
            Writes the report with `save_reports`.
    """
    args, limit = trainer.args, trainer.args.save_total_limit
    if args.should_save:
        (folder / PACKING_REPORT).unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    # The Trainer deletes older checkpoints on rank 0 while others may still write: a run that is killed then would
    # have no whole checkpoint left. Without a limit it deletes none.
    args.save_total_limit = None
    try:
        yield
    finally:
        args.save_total_limit = limit
    trainer.accelerator.wait_for_everyone()
    if not args.should_save:
        return
    if limit is not None and (folder / TRAINING_ARGS_NAME).exists():
        torch.save(args, folder / TRAINING_ARGS_NAME)  # the Trainer has saved them without their limit
    trainer.save_reports(folder)
    best = trainer.state.best_model_checkpoint
    rotate_checkpoints(str(folder.parent), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def write_progress(folder: str | Path, progress: dict[str, Any]) -> None:
    """Write what the Trainer's own state does not hold, for a resumed run to go on from."""
    _write(Path(folder) / _PROGRESS, progress)


def read_progress(folder: str | Path) -> dict[str, Any]:
    """What [`write_progress`] wrote; nothing for a checkpoint of another trainer.

    Raises:
        [`InvalidConfig`]: if it cannot be read.
    """
    path = Path(folder) / _PROGRESS
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise InvalidConfig(
            f"{path} is corrupt: {error}.", do="Resume from another checkpoint, or remove the file to count from 0."
        ) from error
    return found if isinstance(found, dict) else {}


def write_stream_state(folder: str | Path, args: PackedSFTConfig, state: dict[str, Any]) -> None:
    """Write where this rank's stream stands; not with loader workers, which have read ahead, nor if its documents hold
    what JSON does not: a resumed run then reads the stream from its beginning."""
    if args.dataloader_num_workers or not state:
        return
    try:
        content = json.dumps({"of": _stream_identity(args), "state": state})
    except TypeError:
        return
    _stream_path(folder, args).write_text(content + "\n", encoding="utf-8")


def read_stream_state(folder: str | Path, args: PackedSFTConfig) -> dict[str, Any] | None:
    """What [`write_stream_state`] wrote for this rank, if it was written by a run that packs and deals as this one."""
    path = _stream_path(folder, args)
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not args.dataloader_num_workers and written.get("of") == _stream_identity(args):
        return written["state"]
    logger.warning("trl-packfa: the stream is read again from its beginning to where %s stands.", folder)
    return None


def _stream_path(folder: str | Path, args: PackedSFTConfig) -> Path:
    return Path(folder) / f"packing_stream_{args.process_index}.json"


def _stream_identity(args: PackedSFTConfig) -> dict[str, Any]:
    """What decides which documents are in which micro-batch of a stream."""
    names = (
        "packing_strategy", "max_length", "overflow", "per_device_train_batch_size", "gradient_accumulation_steps",
        "world_size", "seed", "data_seed",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def write_reports(
    folder: str | Path,
    packing_reports: Mapping[str, PackingReport],
    exactness: ExactnessReport | None,
    *,
    plan: Mapping[str, float] | None = None,
) -> None:
    """Write `packing_report.json` and, once proven, `exactness_report.json` into a folder."""
    contents: dict[str, Any] = {}
    if exactness is not None:
        contents["exactness_report.json"] = exactness.to_dict()
    contents[PACKING_REPORT] = {name: report.to_dict() for name, report in packing_reports.items()}
    if plan:
        contents[PACKING_REPORT]["plan"] = dict(plan)
    for name, content in contents.items():
        _write(Path(folder) / name, content)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all: a run that is killed meanwhile leaves the old one, or none."""
    # In the same folder, as `os.replace` is atomic within one file system only.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
