"""What every trainer here does around a run: from where it goes on, alone in its folder, with whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .checkpointing import read_progress, tell_left_out, whole_checkpoint, write_progress
from .distributed import from_main_rank
from .guards import only_run_in
from .model_card import copy_card
from .preflight import checkpoint_to_resume, resuming_message
from .resuming import adapter_of, require_same_adapter, require_same_run

logger = get_logger(__name__)


def go_on(trainer: Any, asked: str | bool | None, *, identity: Callable[[], dict[str, str]] | None) -> str | None:
    """The checkpoint that a run goes on from, `None` for its start; the trainer counts its tokens from there.

    Args:
        trainer (`Trainer`):
            Of TRL's, about to train.
        asked (`str` or `bool`, *optional*):
            `resume_from_checkpoint`: a folder, or `True`, `"true"` or `"last"` for the last one that is whole.
        identity (`Callable`, *optional*):
            What the run is made of, see [`identity`]; without it, it may be another one.

    Raises:
        [`InvalidConfig`]: if there is no such checkpoint, its files are not those that were written, or it is of a run
            on other data, labels, or with another adapter.
    """
    folder = trainer.args.output_dir
    checkpoint = from_main_rank(trainer.accelerator, lambda: checkpoint_to_resume(asked, folder))
    if checkpoint is not None:
        logger.info("trl-packfa: %s", resuming_message(checkpoint))
        if trainer.is_world_process_zero():
            tell_left_out(checkpoint)
        progress = read_progress(checkpoint)
        require_same_adapter(progress, trainer.model)
        if identity is not None and not trainer.args.ignore_data_skip:
            require_same_run(progress, identity())
        # TRL counts from 0 again.
        trainer._total_train_tokens = progress.get("num_tokens", 0)
    return checkpoint


def alone_in_folder(args: Any) -> AbstractContextManager[Any]:
    """For the length of a `with` block no other process trains into `output_dir`, where something is saved there."""
    saves = args.should_save and args.save_strategy != "no"  # else nothing there is at stake
    return only_run_in(args.output_dir) if saves else nullcontext()


@contextmanager
def whole(trainer: Any, trial: Any, identity: Callable[[], dict[str, str]]) -> Iterator[Path]:
    """Around a trainer's `_save_checkpoint`: the checkpoint's folder, which is whole only once every rank has written
    its part, what was trained so far and the run's card; older checkpoints go after that.

    Args:
        trainer (`Trainer`):
            Of TRL's, with `save_reports`.
        trial (`Any`):
            Of a hyperparameter search.
        identity (`Callable`):
            What the run is made of.
    """
    folder = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
    with whole_checkpoint(folder, trainer):
        yield folder
        if trainer.args.should_save:
            copy_card(trainer.args.output_dir, folder)
            progress = {"num_tokens": trainer._total_train_tokens, "adapter": adapter_of(trainer.model)}
            write_progress(folder, {**progress, **identity()})
