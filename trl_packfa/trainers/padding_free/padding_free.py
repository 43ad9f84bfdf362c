"""`padding_free(trainer)`: patch all models of any TRL trainer to run without padding, and check them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from datasets import IterableDataset
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments

from ...api import patch, unpatch
from ...checking.first_batch import check_padded_call
from ...comparison import Comparison
from ...config.arguments import WITHOUT_PADS
from ...config.requirements import Run, require
from ...data.collating import CountingCollator
from ...errors import InvalidConfig, PackingError, UnsupportedModel
from ...layout.padded_rows import PaddedRows
from ...parallel.ranks import summed
from ...patching.apply import all_or_none, find_state, unpadding_of
from ...terminal.telling import tell_end
from ..base.clock import TrainingClock
from ..requirements.built import require_images

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

STATE = "trl_packfa_padding_free"  # the attribute of a trainer that holds its run
# The attribute of a trainer that holds the trained model.
POLICY = "model"


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


def attached_run(trainer: Any) -> PaddingFreeRun | None:
    """Return the run that is attached to a trainer, or `None` if the trainer pads."""
    return getattr(trainer, STATE, None)


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


# Metrics that TRL averages over all positions of a padded batch, padding included. None of them is a loss.
_OVER_PADS = {
    "ORPOTrainer": ("logits/chosen", "logits/rejected"),
    "CPOTrainer": ("logits/chosen", "logits/rejected"),
    "OnlineDPOTrainer": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}


class PaddingFreeRun(TrainingClock):
    """The callback of a trainer without padding: it counts rows, checks the first batch, and adds logs.

    `models` run without padding, by the attribute that holds them; those in `left_padded` stay padded. `first_calls`
    are the results of the first batch's comparison for each model. With `shares`, rows share prefixes.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.models: dict[str, nn.Module] = {}
        self.first_calls: dict[str, Comparison] = {}
        self._step = 0  # of the last log
        for cls in type(trainer).__mro__:
            if metrics := _OVER_PADS.get(cls.__name__):
                logger.warning(
                    "trl-packfa: %s averages %s over padding too, where nothing is computed now. These metrics will "
                    "differ from the padded run's; losses and gradients will not.",
                    cls.__name__,
                    ", ".join(metrics),
                )
        own = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if "loss" in logs:
                logs.update(self.read())
            return own(logs, *args, **kwargs)

        trainer.log = log
        trainer.add_callback(self)

    def use(
        self, models: dict[str, nn.Module], left_padded: Sequence[str], *, check_first_batch: bool, shares: bool
    ) -> None:
        """Use these models and settings from now on. Models that are left out are unpatched.

        The trainer's collator counts rows, and compares their beginnings if prefixes are shared.
        """
        trainer = self.trainer
        for name, model in self.models.items():
            if name not in models:
                unpatch(model)
        self.models, self.left_padded = models, tuple(left_padded)
        self.check_first_batch, self.shares = check_first_batch, shares
        if trainer.data_collator is not None and not getattr(trainer, "precompute_ref_logps", False):
            counting = isinstance(trainer.data_collator, CountingCollator)
            own = trainer.data_collator.collator if counting else trainer.data_collator
            trainer.data_collator = CountingCollator(own, share_prefixes=self.shares)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Require that all models are still patched, prepare the check of the first batch, and start the clock."""
        for name, model in self.models.items():
            patched = find_state(model)
            if patched is None or patched.unpadding is None:
                raise UnsupportedModel(
                    f"{type(self.trainer).__name__}.{name} is no longer patched to run without pads.",
                    why=["only some of the trainer's models are patched, and that combination was not verified"],
                    do="Call trl_packfa.padding_free(trainer) after the last change to its models.",
                )
            patched.unpadding.guards, patched.unpadding.called = True, f"{type(self.trainer).__name__}.{name}"
            if self.check_first_batch:
                patched.unpadding.watch = partial(self._check_call, name)
        self._step = state.global_step
        super().on_train_begin()

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Tell the speed, without evaluations and checkpoints, and the padding of all models' rows."""
        self.take()
        seconds, *mine = np.asarray(self.whole).tolist()
        trained, _, tokens, pads, _ = summed(self.trainer.accelerator, {"": mine})[""].tolist()
        tell_end(args, tokens=trained, seconds=seconds, padding=pads / max(tokens + pads, 1), said=self.said)

    def _counts(self) -> np.ndarray:
        """Read the seconds, and the counts of this rank.

        They are true tokens and documents that the policy has trained, and of all models together the true tokens, the
        pads, which were not computed, and the true tokens that were computed in another row.
        """
        states = {name: find_state(model) for name, model in self.models.items()}
        counted = {name: state.unpadding for name, state in states.items() if state is not None and state.unpadding}
        policy = counted.get(POLICY)
        trained = (0, 0) if policy is None else (policy.trained, policy.trained_documents)
        of_all = np.sum([(0, 0, 0), *((one.tokens, one.pads, one.shared) for one in counted.values())], axis=0)
        return np.array([time.perf_counter(), *trained, *of_all])

    def read(self) -> dict[str, float]:
        """Return the values to log since the last call, over all ranks."""
        step = self.trainer.state.global_step
        steps, self._step = step - self._step, step
        seconds, *mine = self.take().tolist()
        trained, documents, tokens, pads, shared = summed(self.trainer.accelerator, {"": mine})[""].tolist()
        if not tokens or not seconds:
            return {}
        found = {"padding_saved": pads / (tokens + pads)}
        if trained:  # otherwise the policy is left padded
            found = {"tokens_per_second": trained / seconds, **found, "documents": documents / max(steps, 1)}
        return {**found, "prefixes_shared": shared / tokens} if self.shares else found

    @property
    def said(self) -> str:
        """The result of the checks, as a sentence of a model card."""
        first = [
            f"{name} {call.difference:.1e} (allowed {call.allowed:.1e})" for name, call in self.first_calls.items()
        ]
        compared = f"; difference of the first batch from its rows alone: {', '.join(first)}" if first else ""
        return f"without padding checked on {', '.join(self.models)} before the first step{compared}."

    def _check_call(
        self, name: str, forward: Callable[..., Any], call: dict[str, Any], rows: PaddedRows, outputs: Any
    ) -> None:
        """Compare a model's first call without padding with its rows alone."""
        model, called = self.models[name], f"{type(self.trainer).__name__}.{name}"
        unpadding = unpadding_of(model)
        assert unpadding is not None
        unpadding.watch = None
        with self.paused():
            first = None if name in self.first_calls else check_padded_call(model, forward, call, rows)
        if first is not None:
            self.first_calls[name] = first = first._replace(where=called)
            logger.info(
                "trl-packfa: %s: first batch differs by %.1e from its rows alone (allowed %.1e), %d of %d places "
                "saved.", name, first.difference, first.allowed, rows.num_pads, rows.num_pads + rows.num_tokens,
            )  # fmt: skip
            first.require()
