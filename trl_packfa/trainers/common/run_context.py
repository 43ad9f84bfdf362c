"""Steps around a run that all trainers share: resume it, lock its folder, and write whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .checkpoint_files import read_progress, tell_left_out, whole_checkpoint, write_progress
from .distributed import from_main_rank
from .guards import only_run_in
from .model_card import copy_card
from .preflight import checkpoint_to_resume, resuming_message
from .resuming import adapter_of, require_same_adapter, require_same_run

logger = get_logger(__name__)


def go_on(trainer: Any, asked: str | bool | None, *, identity: Callable[[], dict[str, str]] | None) -> str | None:
    """Return the checkpoint to resume from, or `None` to start anew; set the trainer's token count to it.

    `asked` is the user's `resume_from_checkpoint`: a folder, or `True`, `"true"` or `"last"` for the last whole
    checkpoint. Without `identity`, which returns the run's [`identity`], the checkpoint's data are not compared.

    Raises:
        [`InvalidConfig`]: if there is no such checkpoint, if its files have changed since they were written, or if it
            is from a run on other data or labels, or with another adapter.
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
        # Otherwise TRL would count from 0 again.
        trainer._total_train_tokens = progress.get("num_tokens", 0)
    return checkpoint


@contextmanager
def collating_with(trainer: Any, collator: Any) -> Iterator[None]:
    """Let a trainer's loader collate with this collator inside a `with` block."""
    own, trainer.data_collator = trainer.data_collator, collator  # TRL's loaders read this attribute
    try:
        yield
    finally:
        trainer.data_collator = own


def alone_in_folder(args: Any) -> AbstractContextManager[Any]:
    """Lock `output_dir` inside a `with` block against other training processes, if this process saves there."""
    saves = args.should_save and args.save_strategy != "no"  # otherwise no file can be damaged
    return only_run_in(args.output_dir) if saves else nullcontext()


@contextmanager
def whole(trainer: Any, trial: Any, identity: Callable[[], dict[str, str]]) -> Iterator[Path]:
    """Yield a checkpoint's folder for the trainer's `_save_checkpoint`, then complete it and mark it as whole.

    The model card, the run's progress and its [`identity`] are added. The checkpoint is whole once every rank has
    written its part; older checkpoints are deleted after that.
    """
    folder = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
    with whole_checkpoint(folder, trainer):
        yield folder
        if trainer.args.should_save:
            copy_card(trainer.args.output_dir, folder)
            progress = {"num_tokens": trainer._total_train_tokens, "adapter": adapter_of(trainer.model)}
            write_progress(folder, {**progress, **identity()})
