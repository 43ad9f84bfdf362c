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

from ..errors import InvalidConfig
from ..packing import PackingReport
from ..patching import inspect as models
from ..patching.apply import find_state
from ..training.checkpointing import write_reports
from ..training.construction import load_as_asked
from ..training.dataloading import tell_counts
from ..training.distributed import require_same_documents
from ..training.model_card import add_section, card_section, name_base
from ..training.model_loading import telling_of_targets
from ..training.resuming import identity
from ..training.runs import alone_in_folder, go_on, whole
from ..training.validation import refuse_precision
from .config import PreferenceConfig
from .cutting import PairCutter
from .overflow import cut_answers, plan_pairs
from .padding_free import run_without_pads
from .recutting import RecutSteps
from .refusals import refuse_before_loading
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(super().__init__, args, kwargs)
        model, asked = given["model"], given.get("args")
        config: Any = self._config
        settled = config(_output_dir(model, self._name())) if asked is None else config.from_args(asked)
        refuse_before_loading(type(self).__name__, given, settled, columns=self._columns)
        quantization, adapter = load_as_asked(
            model, settled, quantization=given.get("quantization_config"), adapter=given.get("peft_config")
        )
        if adapter is not None and given.get("peft_config") is None:
            adapter.task_type = self._task
        self.packing_reports: dict[str, PackingReport] = {}
        self.cut_reason = ""
        given |= {"args": settled, "quantization_config": quantization, "peft_config": adapter}
        with telling_of_targets(model, settled):
            super().__init__(**given)
        self._run_without_pads()
        refuse_precision(
            self.model,
            settled,
            scales_losses=self.accelerator.scaler is not None,
            own_optimizer=self.optimizer is not None,
        )
        if settled.strategy.recuts_steps:
            self._choose_cut(own_collator=given.get("data_collator") is not None)

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
        if own_collator:
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
        uncut = copy.copy(args)
        uncut.max_length = None
        tokenized = by_trl(dataset, processing_class, uncut, dataset_name)
        if not isinstance(tokenized, Dataset):  # an evaluation stream: TRL's collator cuts it
            return by_trl(dataset, processing_class, args, dataset_name)
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
        checkpoint = go_on(self, resume_from_checkpoint, identity=lambda: self._identity)
        with alone_in_folder(self.args):
            return super().train(checkpoint, *args, **kwargs)

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
        if not self.is_world_process_zero():
            return
        name_base(self.args.output_dir, models.model_config(self.model)._name_or_path)
        settings = (
            f'`packing_strategy="{self.args.packing_strategy}"`, `max_length={self.args.max_length}`, '
            f'`overflow="{self.args.overflow}"`'
        )
        add_section(self.args.output_dir, card_section(settings, self.packing_reports, self._run_without_pads().said))

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
