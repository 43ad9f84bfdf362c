"""Files with the position of each rank's stream in a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..config.common import CommonConfig

logger = logging.getLogger(__name__)


def write_stream_state(folder: str | Path, args: CommonConfig, state: dict[str, Any] | None, *, passes: int) -> None:
    """Write the position of this rank's stream, and the number of passes that are over.

    No position is written if the stream has none, loader workers have read ahead, or JSON cannot hold the documents.
    Then a resumed run reads the stream from its beginning.
    """
    content = {"of": _stream_identity(args), "state": state or None, "passes": passes}
    try:
        text = json.dumps({**content, "state": None} if args.dataloader_num_workers else content)
    except TypeError:
        text = json.dumps({**content, "state": None})
    _stream_path(folder, args).write_text(text + "\n", encoding="utf-8")


def read_stream_state(folder: str | Path, args: CommonConfig) -> tuple[dict[str, Any] | None, int]:
    """Read position and passes of [`write_stream_state`]; the position is `None` if there is none of such a run."""
    path = _stream_path(folder, args)
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    state = written.get("state") if written.get("of") == _stream_identity(args) else None
    if args.dataloader_num_workers or state is None:
        state = None
        logger.warning("trl-packfa: the stream is read again from its beginning to the position of %s.", folder)
    return state, written.get("passes", 0)


def _stream_path(folder: str | Path, args: CommonConfig) -> Path:
    return Path(folder) / f"packing_stream_{args.data_parallel_rank}.json"


def _stream_identity(args: CommonConfig) -> dict[str, Any]:
    """Return the arguments that decide which documents are in which micro-batch of a stream."""
    names = (
        "packing_strategy", "max_length", "overflow", "per_device_train_batch_size", "gradient_accumulation_steps",
        "seed", "data_seed",
    )  # fmt: skip
    return {"world_size": args.data_parallel_size, **{name: getattr(args, name) for name in names}}
