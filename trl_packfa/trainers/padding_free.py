"""`padding_free(trainer)`: any TRL trainer without padding, its models patched alike, proven, and what it saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from datasets import IterableDataset
from torch import nn
from transformers import Trainer

from ..api import patch
from ..errors import InvalidConfig, PackingError
from ..patching.apply import all_or_none, find_state
from ..patching.unpadding import Unpadding
from .models import POLICY, models_of
from .refusals import refuse_liger
from .run import PaddingFreeRun

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

STATE = "trl_packfa_padding_free"


def padding_free(
    trainer: AnyTrainer,
    *,
    backend: str = "auto",
    fused_lora: bool = True,
    fused_kernels: bool = True,
    share_prefixes: bool = False,
    leave_padded: Sequence[str] | None = None,
    check_first_batch: bool = True,
) -> AnyTrainer:
    """Make a trainer compute no padding; returns the same trainer. Call it after construction, and again after a
    change to its models or with other arguments.

    Every model that the trainer runs (policy, reference, teacher, reward and value models) is patched by
    `patch(model, unpad=True)`, which proves at once that padded batches have the same outputs and gradients without
    their pads. When training begins, the first real batch of each model is compared with some of its rows alone, and a
    loss that reads pads is refused.

    Losses, metrics, steps and checkpoints stay the trainer's own. Its logs gain `tokens_per_second` (true tokens that
    were trained), `padding_saved` (the share of all places that held no token) and `documents` (rows a step).

    Args:
        trainer (`transformers.Trainer`):
            Any of TRL's, constructed.
        backend (`str`, *optional*, defaults to `"auto"`), fused_lora, fused_kernels (`bool`, *optional*, defaults to
        `True`):
            As of [`patch`].
        share_prefixes (`bool`, *optional*, defaults to `False`):
            As of [`patch`]: the prompt of a pair, or of a group of completions, is computed once. The logs gain
            `prefixes_shared`, the share of the true tokens that were computed in another row.
        leave_padded (`Sequence[str]`, *optional*):
            Names of attributes that hold models which stay as they are, such as a reward model that attends in both
            directions. By default none, or those that were left so by the call before.
        check_first_batch (`bool`, *optional*, defaults to `True`):
            Whether the first real batch is compared.

    Raises:
        [`InvalidConfig`]: if this is no trainer of padded text batches: it packs already, uses Liger kernels, trains
            on images, holds no model of a name in `leave_padded`, or none besides.
        [`UnsupportedModel`]: if one of its models cannot run without pads; then none is changed.
        [`ContaminationError`]: if one of them is not exact without pads; then none is changed.
    """
    _require_trainer(trainer)
    options = {
        "backend": backend,
        "fused_lora": fused_lora,
        "fused_kernels": fused_kernels,
        "share_prefixes": share_prefixes,
    }
    run_without_pads(trainer, leave_padded=leave_padded, check_first_batch=check_first_batch, **options)
    return trainer


def run_without_pads(
    trainer: Any, *, leave_padded: Sequence[str] | None = None, check_first_batch: bool = True, **options: Any
) -> PaddingFreeRun:
    """Patch a trainer's models and attach what reports on them, where it is not; `options` are [`patch`]'s.

    Raises:
        As [`padding_free`], of what concerns models.
    """
    models, run = models_of(trainer), attached_run(trainer)
    if leave_padded is None:
        leave_padded = () if run is None else run.left_padded
    unknown = sorted(set(leave_padded) - models.keys())
    if unknown:
        raise InvalidConfig(
            f"leave_padded names {', '.join(unknown)}, this {type(trainer).__name__} holds {', '.join(models)}.",
            do="Name models of this trainer.",
        )
    models = {name: model for name, model in models.items() if name not in leave_padded}
    if not models:
        raise InvalidConfig(
            f"leave_padded names all models of this {type(trainer).__name__}: {', '.join(leave_padded)}.",
            do="Train it as it is, without padding_free.",
        )
    _patch_all(trainer, models, **options)
    shares = bool(options.get("share_prefixes"))
    if run is not None:
        run.change(models, leave_padded, check_first_batch=check_first_batch, shares=shares)
        return run
    run = PaddingFreeRun(trainer, models, leave_padded, check_first_batch=check_first_batch, shares=shares)
    setattr(trainer, STATE, run)
    _tell_of_metrics(trainer)
    run.attach()
    return run


def attached_run(trainer: Any) -> PaddingFreeRun | None:
    """What reports on a trainer's models, `None` of a trainer that pads."""
    return getattr(trainer, STATE, None)


def _patch_all(trainer: Any, models: dict[str, nn.Module], **options: Any) -> None:
    """All of them, or none."""
    with all_or_none(models.values()):
        for name, model in models.items():
            try:
                with trainer.accelerator.autocast():
                    patch(model, unpad=True, **options)
            except PackingError as error:
                raise type(error)(
                    f"{type(trainer).__name__}.{name} cannot run without its pads; none of the trainer's models was "
                    "changed.",
                    why=[str(error)],
                    do=f"Leave it padded with leave_padded=({name!r},), or train padded.",
                ) from error
            if name != POLICY:  # a reference, a teacher or a reward model scores
                _unpadding_of(model).generates = False


def _unpadding_of(model: nn.Module) -> Unpadding:
    state = find_state(model)
    assert state is not None and state.unpadding is not None, "patched with unpad=True"
    return state.unpadding


# Metrics, not losses, that TRL averages over all positions of a padded batch, pads included.
_OVER_PADS = {
    "ORPOTrainer": ("logits/chosen", "logits/rejected"),
    "CPOTrainer": ("logits/chosen", "logits/rejected"),
    "OnlineDPOTrainer": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}


def _tell_of_metrics(trainer: Any) -> None:
    for cls in type(trainer).__mro__:
        if metrics := _OVER_PADS.get(cls.__name__):
            logger.warning(
                "trl-packfa: %s averages %s over pads as well, where nothing is computed now: these metrics will "
                "differ from the padded run's, losses and gradients will not.",
                cls.__name__,
                ", ".join(metrics),
            )


def _require_trainer(trainer: Any) -> None:
    """What no patch of its models makes padding-free is refused.

    Raises:
        [`InvalidConfig`]: naming what.
    """
    if not isinstance(trainer, Trainer) or not isinstance(trainer.model, nn.Module):
        raise InvalidConfig(
            f"padding_free takes a trainer with a model, got {type(trainer).__name__}.",
            do="Call it on the trainer, once it is constructed: trl_packfa.padding_free(DPOTrainer(...)).",
        )
    args, name = trainer.args, type(trainer).__name__
    if hasattr(trainer, "packing_reports"):
        raise InvalidConfig(f"{name} packs its batches already.", do="Use it as it is, without padding_free.")
    refuse_liger(args, name)
    if getattr(trainer, "_is_vision_dataset", False) or _has_images(trainer.train_dataset):
        raise InvalidConfig(
            f"{name} trains on images, whose places the model finds in padded rows.",
            do="Train it padded; text alone can be trained without padding.",
        )


def _has_images(dataset: Any) -> bool:
    """Whether a dataset has a column that TRL takes images from; GRPO and RLOO look for it when they generate."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and isinstance(dataset, IterableDataset):
        columns = list(next(iter(dataset), {}))
    return not {"image", "images"}.isdisjoint(columns or ())
