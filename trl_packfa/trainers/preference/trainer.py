"""Common base of `PackedDPOTrainer`, `PackedRewardTrainer` and `PackedKTOTrainer`, and of their configs."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from datasets import Dataset
from transformers import TrainingArguments

from ...config.common import CommonConfig
from ...data.dataset import tell_counts
from ...data.image_examples import why_images_stay
from ...data.step_cutting import keep_padded
from ...data.templates import named_conversations, naming_conversations
from ...packing import MINIBATCH, STEP, Strategy
from ...parallel.ranks import require_same_documents
from ...versions import installed_version
from ..loading import output_dir, require_trained
from ..padding_free.padding_free import run_without_pads
from ..padding_free.run import attached_run
from ..requirements.built import runs_by_document
from ..requirements.training import Training
from ..saving.resuming import identity
from ..settling import settle
from .cutting import ImagePairCutter, PairPlan, cut_answers, plan_pairs
from .recutting import RecutSteps


class PackedPreference(RecutSteps):
    """Base class of the packed preference trainers. It comes before TRL's trainer in their base classes.

    It patches the trainer's models as [`padding_free`] does, and cuts the data. Under `packing_strategy="step"` it
    re-cuts steps if the loss allows it.
    """

    _config: ClassVar[Any]  # a `PreferenceConfig`
    _task: ClassVar[str] = "CAUSAL_LM"  # of the adapter
    _label: ClassVar[str] = "labels"  # column of the dataset
    _columns: ClassVar[tuple[tuple[str, ...], ...]] = (("chosen", "rejected"),)  # of each format that TRL accepts
    _takes_images: ClassVar[bool] = False  # whether TRL's trainer has a collator of images

    _tokenizer: Any  # TRL's
    # Whether models run without padding. With a plain config, a run that cannot do so trains padded, as TRL would.
    _packs = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(inspect.signature(super().__init__).bind(*args, **kwargs).arguments)
        model, user_args = given["model"], given.get("args")
        is_asked = isinstance(user_args, self._config) or bool(getattr(user_args, "padding_free", False))
        options: Any = {"model": model, "given": given, "formats": self._columns, "takes_images": self._takes_images}

        def packed() -> Any:
            return self._default_config(model) if user_args is None else self._config.from_args(user_args)

        # A config of TRL's asks for no packing.
        run, refusal = settle(
            Training(user_args, type(self).__name__, **options),
            [packed],
            padded=None if is_asked else lambda: user_args,
        )
        if refusal is not None:
            self._tell_padded(refusal)
            return self._construct_padded(given)
        with self._undone_if_refused(given["model"]):
            self._construct(given, run.args)

    def _construct(self, given: dict[str, Any], settled: Any) -> None:
        """Run TRL's `__init__` with the model that the config describes, then patch the trainer's models."""
        self.packing_reports, self._measured = {}, {}
        self._own_collator = given.get("data_collator") is not None
        self._build(given["model"], settled, given, user_args=given.get("args"), task=self._task)
        if self._is_vision_dataset:
            self.name_rows()
        self._run_without_pads()
        if settled.strategy.recuts_steps:
            self._choose_cut()

    def _construct_padded(self, given: dict[str, Any]) -> None:
        """Run TRL's `__init__` with the user's arguments, for padded training."""
        self._packs, self.packing_reports = False, {}
        if given.get("args") is None:
            given["args"] = self._default_config(given["model"], use_peft=False)
        super().__init__(**given)
        require_trained(self.model, given)

    def _default_config(self, model: Any, **options: Any) -> Any:
        method = type(self).__name__.removeprefix("Packed").removesuffix("Trainer")
        return self._config(output_dir(model, method), **options)

    def _run_without_pads(self) -> None:
        """Patch every model of the trainer to run without padding."""
        run_without_pads(self, check_first_batch=self.args.check_packing, **self.args.patch_options)

    def _choose_cut(self) -> None:
        """Prepare to re-cut steps if the loss is a mean over pairs; otherwise log the reason, and keep it."""
        self.cut_reason = self._why_kept()
        if self.cut_reason:
            keep_padded(self.args, self.cut_reason)
        elif self._is_vision_dataset:
            self._cutter = ImagePairCutter(self, rows=len(self._rows))
        else:
            self._cutter = PairPlan(self, rows=self._rows)
            require_same_documents(self.accelerator, self._cutter.lengths)

    def _why_kept(self) -> str:
        if not isinstance(self.train_dataset, Dataset):
            return "the pairs of a stream are not known before they are read"
        if self._own_collator:
            return "data_collator makes the batches, and they may depend on which pairs are together"
        if hook := super()._why_kept():
            return hook
        if getattr(self, "aux_loss_enabled", False):
            return "the routers' auxiliary loss is computed over each padded micro-batch"
        if self._is_vision_dataset and (why := why_images_stay(self.model, self.neftune_noise_alpha)):
            return why
        if self.neftune_noise_alpha is not None and runs_by_document(self.model):
            return "NEFTune's noise depends on the padded row, but the backbone runs document by document"
        return self._why_not_cut()

    def _why_not_cut(self) -> str:
        """Return the reason why the loss is not a mean over single pairs; `""` if it is one."""
        return ""

    # Data ------------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Let TRL tokenize a dataset, then cut it ourselves to count every dropped pair and token."""
        by_trl: Callable[..., Any] = super()._prepare_dataset  # type: ignore[misc]  # of TRL's trainers
        options: Any = {"name": dataset_name, "tokenizer": processing_class}
        if not self._packs or not isinstance(dataset, Dataset):  # TRL's collator cuts a stream
            with naming_conversations(dataset, **options):
                return by_trl(named_conversations(dataset, **options), processing_class, args, dataset_name)
        uncut = copy.copy(args)
        uncut.max_length = None
        with naming_conversations(dataset, **options):
            tokenized = by_trl(dataset, processing_class, uncut, dataset_name)
        kept, report = plan_pairs(
            tokenized, self._rows, max_length=args.max_length, policy=args.overflow, name=dataset_name
        )
        self.packing_reports[dataset_name] = report
        tell_counts(report, dataset_name)
        if len(kept) < len(tokenized):
            tokenized = tokenized.select(kept)
            # TRL mismatches the answers anew, among those that are kept. Only its KTO trainer has the attribute.
            if getattr(self, "calculate_KL", False):
                made = [column for column in tokenized.column_names if column.endswith("_ids")]
                tokenized = by_trl(tokenized.remove_columns(made), processing_class, uncut, dataset_name)
        if report.truncated:
            tokenized = cut_answers(tokenized, self._rows, max_length=args.max_length, name=dataset_name)
        return tokenized

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Patch the models, then precompute as TRL does. TRL calls this before construction has ended."""
        if self._packs:
            self._run_without_pads()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]  # of TRL's trainers

    # Runs and checkpoints --------------------------------------------------------------------------------------------

    @cached_property
    def _identity(self) -> dict[str, str]:
        columns = sorted({column for row in self._rows for column in row})
        return identity(self.train_dataset, self.processing_class, columns=columns, labels=self._label)

    def _check_as_text(self) -> str:
        run = attached_run(self)
        return "" if run is None else run.said


logger = logging.getLogger(__name__)

# Strategies by `packing_strategy`. Those that fill rows over the whole dataset are missing, because their steps would
# differ from the padded run's.
_STRATEGIES = {strategy.name: strategy for strategy in (STEP, MINIBATCH)}


@dataclass
class PreferenceConfig(CommonConfig):
    """Fields of a packed preference trainer's config, in addition to those of TRL's config and `ModelConfig`."""

    packing_strategy: str = field(
        default=STEP.name,
        metadata={
            "help": "`'step'`: each optimizer step has the pairs of the padded run. If the loss is a mean over pairs, "
            "they are re-cut into as few and as equal micro-batches as the token budget allows; a pair is never "
            "split. `'minibatch'`: each micro-batch has the pairs of the padded run's micro-batch.",
            "choices": list(_STRATEGIES),
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Token budget of a micro-batch under `packing_strategy='step'`. Both answers of a pair count, "
            "with their prompts; a pad as an eighth of a token, or as one with `auto_find_batch_size`. Default: that "
            "of the padded run's largest micro-batch."
        },
    )
    overflow: str = field(
        default="truncate",
        metadata={
            "help": "What happens to pairs with a row longer than `max_length`: `'truncate'`, `'drop'`, or `'error'`. "
            "`'truncate'` is TRL's: it cuts the end of the answer, and drops a pair whose prompt leaves no room for "
            "an answer. The report counts them.",
            "choices": ["truncate", "drop", "error"],
        },
    )

    def _settle(self) -> None:
        args: Any = self
        if getattr(args, "padding_free", False):
            logger.warning(
                "trl-packfa: padding_free=True trains without padding here; TRL %s's own trainer would warn and pad.",
                installed_version("trl"),
            )
            args.padding_free = False  # otherwise TRL's trainer would warn that it ignores the field

    @property
    def strategy(self) -> Strategy:
        """The strategy that `packing_strategy` names."""
        return _STRATEGIES[self.packing_strategy]

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Any:
        """Convert TRL's or transformers' arguments to a config of this class; return one of this class unchanged."""
        return args if isinstance(args, cls) else cls(**cls.fields_of(args))
