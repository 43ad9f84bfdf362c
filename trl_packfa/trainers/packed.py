"""What `PackedDPOTrainer`, `PackedRewardTrainer` and `PackedKTOTrainer` add to TRL's trainers.

Models run without pads by [`padding_free`]'s own machinery, data is cut with every loss counted, and under
`packing_strategy="step"` steps are re-cut ([`RecutSteps`]) where the loss allows it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from datasets import Dataset

from ..api import unpatch
from ..errors import ContaminationError, InvalidConfig, NoBackend, PackingError, UnsupportedModel
from ..packing import PackingReport
from ..patching import inspect as models
from ..patching.apply import find_state
from ..training.checkpointing import write_reports
from ..training.construction import load_as_asked
from ..training.dataloading import tell_counts
from ..training.distributed import require_same_documents
from ..training.model_card import add_section, card_section, name_base
from ..training.model_loading import named, telling_of_targets
from ..training.plain_config import AsGiven, tell_adapter, tell_padded
from ..training.resuming import identity
from ..training.runs import alone_in_folder, go_on, whole
from ..training.validation import refuse_precision, refuse_untrainable
from .config import PreferenceConfig
from .cutting import PairCutter
from .overflow import cut_answers, plan_pairs
from .padding_free import STATE, attached_run, run_without_pads
from .recutting import RecutSteps
from .refusals import refuse_before_loading, require_columns, require_run
from .run import PaddingFreeRun

logger = get_logger(__name__)


class PackedPreference(RecutSteps):
    """Stands before TRL's trainer among the bases of a packed one.

    Attributes:
        packing_reports (`dict[str, PackingReport]`): by dataset name, rows and tokens in and out, and what was lost.
        cut_reason (`str`): why steps are not re-cut; empty if they are.
    """

    # Of each trainer: its config, its adapters' task, and its column that says what an answer trains.
    _config: ClassVar[type[PreferenceConfig]]
    _task: ClassVar[str] = "CAUSAL_LM"
    _label: ClassVar[str] = "labels"
    # The columns of each format that TRL's trainer takes.
    _columns: ClassVar[tuple[tuple[str, ...], ...]] = (("chosen", "rejected"),)

    train_dataset: Any
    # Whether models run without pads; a plain config that cannot be met trains as TRL would.
    _packs = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(super().__init__, args, kwargs)
        refuse_untrainable(given["model"], given.get("peft_config"))
        self.packing_reports: dict[str, PackingReport] = {}
        self.cut_reason = ""
        as_given = AsGiven(given["model"])  # before an adapter is put around it
        settled, refusal = self._settle(given)
        if settled is not None:
            try:
                self._construct(dict(given), settled)
                return
            except (UnsupportedModel, ContaminationError, NoBackend, InvalidConfig) as late:
                if self._asks_to_pack(given.get("args")):
                    raise
                self._undo()
                given["model"], refusal = as_given.restore(vars(self).get("model")), late
        assert refusal is not None
        tell_padded(refusal, f"{self._name()}Trainer")
        self._construct_padded(given)

    def _asks_to_pack(self, asked: Any) -> bool:
        """Whether a run without pads was asked for, by a class or a field, so that padding would be no answer."""
        return isinstance(asked, self._config) or bool(getattr(asked, "padding_free", False))

    def _settle(self, given: dict[str, Any]) -> tuple[Any, PackingError | None]:
        """The config to train with; or none, and why TRL's own training is all that can be done for a plain one.

        Raises:
            [`PackingError`]: if a run without pads was asked for and cannot be.
        """
        model, asked = given["model"], given.get("args")
        config: Any = self._config
        for name, dataset in named(given.get("train_dataset"), given.get("eval_dataset")):
            if isinstance(dataset, Dataset) and len(dataset):  # whatever trains, it needs them
                require_columns(dataset, name=name, trainer=type(self).__name__, formats=self._columns)
        try:
            settled = config(_output_dir(model, self._name())) if asked is None else config.from_args(asked)
            refuse_before_loading(type(self).__name__, given, settled)
        except PackingError as refusal:
            if self._asks_to_pack(asked):
                raise
            return None, refusal
        require_run(given, settled)
        return settled, None

    def _construct(self, given: dict[str, Any], settled: Any) -> None:
        """TRL's construction, with the model loaded and adapted as the config says, then without pads."""
        quantization, adapter = load_as_asked(
            given["model"],
            settled,
            quantization=given.get("quantization_config"),
            adapter=given.get("peft_config"),
        )
        if adapter is not None and given.get("peft_config") is None:
            adapter.task_type = self._task
            tell_adapter(given.get("args"), settled, adapter)
        given |= {"args": settled, "quantization_config": quantization, "peft_config": adapter}
        with telling_of_targets(given["model"], settled):
            super().__init__(**given)
        refuse_precision(
            self.model,
            settled,
            scales_losses=self.accelerator.scaler is not None,
            own_optimizer=self.optimizer is not None,
        )
        self._run_without_pads()
        if settled.strategy.recuts_steps:
            self._choose_cut(own_collator=given.get("data_collator") is not None)

    def _construct_padded(self, given: dict[str, Any]) -> None:
        """TRL's construction, with TRL's arguments as they were given."""
        config: Any = self._config
        self._packs = False
        if given.get("args") is None:
            given["args"] = config(_output_dir(given["model"], self._name()), use_peft=False)
        super().__init__(**given)

    def _undo(self) -> None:
        """Take back what a construction has put on models before it was refused."""
        run = attached_run(self)
        for model in run.models.values() if run is not None else ():
            unpatch(model)
        vars(self).pop(STATE, None)
        self._cutter, self.cut_reason, self.packing_reports = None, "", {}

    def _name(self) -> str:
        return type(self).__name__.removeprefix("Packed").removesuffix("Trainer")

    def _run_without_pads(self) -> PaddingFreeRun:
        """Patch every model of the trainer, once."""
        run: PaddingFreeRun = run_without_pads(
            self,
            check_first_batch=self.args.check_packing,
            **self.args.patch_options,
        )
        return run

    def _choose_cut(self, *, own_collator: bool) -> None:
        """Re-cut steps where the loss is a mean over pairs; else say why not."""
        own_loss = type(self).compute_loss is not PackedPreference.compute_loss
        if not isinstance(self.train_dataset, Dataset):
            self.cut_reason = "the pairs of a stream are not counted before they come"
        elif own_collator:
            self.cut_reason = "data_collator makes the batches of the padded run, and may make others of other pairs"
        elif own_loss:
            self.cut_reason = f"compute_loss of {type(self).__name__} is not TRL's"
        elif getattr(self, "aux_loss_enabled", False):
            self.cut_reason = "the routers' auxiliary loss is of each padded micro-batch"
        elif self.neftune_noise_alpha is not None and _runs_by_document(self.model):
            self.cut_reason = "NEFTune's noise follows the padded row, and the backbone runs document by document"
        else:
            self.cut_reason = self._why_not_cut()
        if not self.cut_reason:
            cutter = PairCutter(
                self.args, rows=self._rows, train_dataset=self.train_dataset, model=self.model,
                accelerator=self.accelerator,
            )  # fmt: skip
            require_same_documents(self.accelerator, cutter.tokens)
            self._cutter = cutter
            return
        budget = self.args.max_tokens_per_microbatch
        if budget is not None:
            raise InvalidConfig(
                f"max_tokens_per_microbatch={budget} has no effect: padded micro-batches stay as they are.",
                why=[self.cut_reason],
                do="Drop it; lower per_device_train_batch_size and raise gradient_accumulation_steps to save memory.",
            )
        logger.info("trl-packfa: padded micro-batches stay as they are: %s.", self.cut_reason)

    def _why_not_cut(self) -> str:
        """What of the loss is no mean over single pairs, empty if nothing is."""
        return ""

    # Data ------------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Tokenized by TRL, cut by us, so that no pair or token is lost without being counted."""
        by_trl: Callable[..., Any] = super()._prepare_dataset  # type: ignore[misc]  # of TRL's trainers
        if not self._packs or not isinstance(dataset, Dataset):  # a stream is cut by TRL's collator
            return by_trl(dataset, processing_class, args, dataset_name)
        uncut = copy.copy(args)
        uncut.max_length = None
        tokenized = by_trl(dataset, processing_class, uncut, dataset_name)
        kept, report = plan_pairs(
            tokenized, self._rows, max_length=args.max_length, policy=args.overflow, name=dataset_name
        )
        self.packing_reports[dataset_name] = report
        tell_counts(report, dataset_name)
        if len(kept) < len(tokenized):
            tokenized = self._select(tokenized, kept, lambda rest: by_trl(rest, processing_class, uncut, dataset_name))
        if report.truncated:
            options = {"max_length": args.max_length, "also": self._answers_beside(), "name": dataset_name}
            tokenized = cut_answers(tokenized, self._rows, **options)
        return tokenized

    def _select(self, dataset: Dataset, kept: Any, prepare: Callable[[Dataset], Dataset]) -> Dataset:
        """The pairs that are kept; `prepare` is TRL's preparation, where it depends on their neighbours."""
        return dataset.select(kept)

    def _answers_beside(self) -> tuple[str, ...]:
        """Columns of more answers to a row's prompt that the dataset has."""
        return ()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, without pads: it runs before construction has ended."""
        if self._packs:
            self._run_without_pads()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]  # of TRL's trainers

    # Runs and checkpoints --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`; `resume_from_checkpoint=True` (or `"true"`, `"last"`) takes the last checkpoint that was
        written whole.

        Raises:
            [`UnsupportedModel`]: if a model of the trainer is no longer patched.
            [`InvalidConfig`]: if there is no such checkpoint, or it is of a run on other data.
        """
        checkpoint = go_on(self, resume_from_checkpoint, identity=self._identify)
        with alone_in_folder(self.args):
            return super().train(checkpoint, *args, **kwargs)

    @property
    def _identify(self) -> Callable[[], dict[str, str]] | None:
        """What says which run this is, of one that packs."""
        return (lambda: self._identity) if self._packs else None

    @cached_property
    def _identity(self) -> dict[str, str]:
        columns = sorted({column for row in self._rows for column in row})
        return identity(self.train_dataset, self.processing_class, columns=columns, labels=self._label)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """TRL's, whole only once every rank has written its part; older checkpoints go after that."""
        with whole(self, trial, lambda: self._identity):
            super()._save_checkpoint(model, trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card, with a section on what ran without pads and its proof."""
        card: Any = super().create_model_card  # type: ignore[misc]  # of TRL's trainers
        card(*args, **kwargs)
        run = attached_run(self)
        if run is None or not self.is_world_process_zero():
            return
        name_base(self.args.output_dir, models.model_config(self.model)._name_or_path)
        settings = (
            f'`packing_strategy="{self.args.packing_strategy}"`, `max_length={self.args.max_length}`, '
            f'`overflow="{self.args.overflow}"`'
        )
        add_section(self.args.output_dir, card_section(settings, self.packing_reports, run.said))

    def save_reports(self, folder: str | Path) -> None:
        """Write `packing_report.json` into a folder."""
        write_reports(folder, self.packing_reports, None)


def _runs_by_document(model: Any) -> bool:
    state = find_state(model)
    return state is not None and state.patch.rebatch


def _bound(construct: Callable[..., None], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, as TRL's trainer takes them."""
    bound = inspect.signature(construct).bind(*args, **kwargs)
    return dict(bound.arguments)


def _output_dir(model: Any, name: str) -> str:
    """TRL's default output directory."""
    of = model if isinstance(model, str) else model.config._name_or_path
    return f"{of.rstrip('/').split('/')[-1] or 'model'}-{name}"
