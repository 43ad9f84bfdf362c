"""`padding_free(trainer)`: patch all models of any TRL trainer to run without padding, and check them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from datasets import IterableDataset
from torch import nn
from transformers import PreTrainedModel, Trainer

from ...api import patch
from ...config.arguments import WITHOUT_PADS
from ...config.requirements import Run, require
from ...errors import InvalidConfig, PackingError
from ...patching.state import all_or_none, find_state
from ..requirements.built import require_images
from .run import POLICY, STATE, PaddingFreeRun, attached_run

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def padding_free(
    trainer: AnyTrainer,
    *,
    leave_padded: Sequence[str] | None = None,
    check_first_batch: bool = True,
    **options: Any,
) -> AnyTrainer:
    """Make a trainer compute no padding, and return the same trainer.

    Call it after construction. Call it again after a change to the trainer's models, or to use other arguments.

    Every model that the trainer runs (policy, reference, teacher, reward and value models) is patched with
    `patch(model, unpad=True)`. This checks at once that a padded batch has the same outputs and gradients without its
    padding. When training begins, the first real batch of each model is compared with some of its rows run alone, and
    a loss that reads padding is refused.

    Losses, metrics, steps and checkpoints stay the trainer's own. Its logs gain `tokens_per_second` (true tokens that
    were trained), `padding_saved` (share of all positions that hold no token) and `documents` (rows per step).

    Args:
        trainer (`transformers.Trainer`):
            Any TRL trainer, already constructed.
        leave_padded (`Sequence[str]`, *optional*):
            Names of attributes whose models stay unpatched, such as a reward model with bidirectional attention.
            Default: those of the previous call, or none.
        check_first_batch (`bool`, *optional*, defaults to `True`):
            Whether to compare the first real batch.
        **options:
            `backend`, `fused_kernels` and `share_prefixes` of [`patch`]. With `share_prefixes=True` the logs gain
            `prefixes_shared`, the share of the true tokens that were computed in another row.

    Raises:
        [`InvalidConfig`]: if the trainer packs already, uses Liger kernels, or is no trainer with a model; if
            `leave_padded` has a name that holds no model, or names all models.
        [`UnsupportedModel`]: if one of its models cannot run without padding, or not with the trainer's images. Then
            no model is changed.
        [`ContaminationError`]: if one of its models is not exact without padding. Then no model is changed.
    """
    _require_trainer(trainer)
    run_without_pads(trainer, leave_padded=leave_padded, check_first_batch=check_first_batch, **options)
    return trainer


def run_without_pads(
    trainer: Any, *, leave_padded: Sequence[str] | None = None, check_first_batch: bool = True, **options: Any
) -> None:
    """Patch a trainer's models and attach a [`PaddingFreeRun`] to it, or update the attached one.

    `options` are keyword arguments of [`patch`]. See [`padding_free`] for what is refused.
    """
    models, run = models_of(trainer), attached_run(trainer)
    if leave_padded is None:
        leave_padded = () if run is None else run.left_padded
    unknown = sorted(set(leave_padded) - models.keys())
    if unknown:
        raise InvalidConfig(
            f"leave_padded names {', '.join(unknown)}, but this {type(trainer).__name__} holds {', '.join(models)}.",
            do="Name models of this trainer.",
        )
    models = {name: model for name, model in models.items() if name not in leave_padded}
    if not models:
        raise InvalidConfig(
            f"leave_padded names all models of this {type(trainer).__name__}: {', '.join(leave_padded)}.",
            do="Train it as it is, without padding_free.",
        )
    _patch_all(trainer, models, **options)
    run = run or PaddingFreeRun(trainer)
    setattr(trainer, STATE, run)
    run.use(models, leave_padded, check_first_batch=check_first_batch, shares=bool(options.get("share_prefixes")))


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """Find a trainer's transformers models, each once, by the attribute that holds it (`name[i]` in a list)."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, value in {POLICY: trainer.model, **vars(trainer)}.items():
        if name in ("model_wrapped", "deepspeed"):  # the policy again, wrapped
            continue
        listed = isinstance(value, (list, tuple))
        for i, module in enumerate(value if listed else [value]):
            parts = module.modules() if isinstance(module, nn.Module) else ()
            inner = next((part for part in parts if isinstance(part, PreTrainedModel)), None)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                at = f"{name}[{i}]" if listed else name
                found[at] = trainer.accelerator.unwrap_model(module, keep_torch_compile=True)
    return found


def _patch_all(trainer: Any, models: dict[str, nn.Module], **options: Any) -> None:
    """Patch all models; if one is refused, each is patched as it was before."""
    with all_or_none(models.values()):
        for name, model in models.items():
            try:
                with trainer.accelerator.autocast():
                    patch(model, unpad=True, **options)
                if _has_images(trainer):
                    require_images(model)
            except PackingError as error:
                raise type(error)(
                    f"{type(trainer).__name__}.{name} cannot run without its pads; none of the trainer's models was "
                    "changed.",
                    why=[str(error)],
                    do=f"Leave it padded with leave_padded=({name!r},), or train padded.",
                ) from error
    for name, model in models.items():
        if name != POLICY:  # a reference, teacher or reward model only scores
            state = find_state(model)
            assert state is not None and state.unpadding is not None, "patched with unpad=True"
            state.unpadding.generates = False


def _require_trainer(trainer: Any) -> None:
    """Refuse a trainer that cannot be made padding-free by patching its models."""
    if not isinstance(trainer, Trainer) or not isinstance(trainer.model, nn.Module):
        raise InvalidConfig(
            f"padding_free takes a trainer with a model, got {type(trainer).__name__}.",
            do="Call it on the trainer, once it is constructed: trl_packfa.padding_free(DPOTrainer(...)).",
        )
    name = type(trainer).__name__
    if hasattr(trainer, "packing_reports"):
        raise InvalidConfig(f"{name} packs its batches already.", do="Use it as it is, without padding_free.")
    require(WITHOUT_PADS, Run(trainer.args, name))


def _has_images(trainer: Any) -> bool:
    """Tell whether a trainer trains on images. GRPO and RLOO look for the column when they generate."""
    if getattr(trainer, "_is_vision_dataset", False):
        return True
    dataset = trainer.train_dataset
    columns = getattr(dataset, "column_names", None)
    if columns is None and isinstance(dataset, IterableDataset):
        columns = list(next(iter(dataset), {}))
    return not {"image", "images"}.isdisjoint(columns or ())
