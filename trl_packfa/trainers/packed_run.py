"""`PackedRun`: what the packed trainers do alike around TRL's trainer.

It gives back a model that is refused, loads and cuts the examples of steps that are re-cut, resumes, and writes whole
checkpoints, reports and model cards. On images, errors name the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import PreTrainedModel

from ..api import unpatch
from ..checking import CheckReport
from ..config.common import CommonConfig
from ..config.requirements import require
from ..data.collating import CountedBatch
from ..data.dataset import named_datasets
from ..data.image_rows import NamingCollator, NumberedRows, look_at_images
from ..data.step_cutting import count_true_tokens, keep_padded
from ..data.steps import (
    REBALANCES,
    Plan,
    StepRows,
    StepSampler,
    micro_batches_of,
    rank_loader,
    require_length,
    require_whole_step,
)
from ..errors import PackingError, figure
from ..override import set_inside
from ..packing import PackedBatchSampler, PackingReport
from ..parallel.ranks import agree, from_main_rank, summed
from ..patching import inspect
from ..patching.state import find_state, restore_patch
from .loading import loading_as_configured, require_trained
from .requirements.built import BUILT
from .requirements.training import Training
from .saving.card import add_section, name_base, packing_section
from .saving.checkpoint_files import (
    PACKING_REPORT,
    PROGRESS,
    checkpoint_to_resume,
    read_progress,
    resuming_message,
    tell_left_out,
    whole_checkpoint,
    write_json,
)
from .saving.lock import only_run_in
from .saving.resuming import adapter_of, require_same_adapter, require_same_run, settings_of, tell_changed

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

logger = get_logger(__name__)


# Methods of the Trainer that get a micro-batch. What a user's own one makes of it may depend on the examples in it.
HOOKS = ("compute_loss", "training_step", "get_batch_samples")


class PackedRun(Base):
    """A base class of the packed trainers. It comes before TRL's trainer in their base classes."""

    # The Trainer declares these types more loosely, or TRL's trainers assign them without a declaration.
    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    _metrics: Any
    _total_train_tokens: int
    _train_batch_size: int
    _is_vision_dataset: bool = False

    packing_reports: dict[str, PackingReport]
    packing_plan: Mapping[str, float] = {}
    check_report: CheckReport | None = None
    _resumed_from: str | None = None
    _operations: int | None = None  # of one token, once they are counted
    _unsettled = 0  # true tokens that this rank has trained and the others do not know of

    # Set by each trainer: whether the run is packed, its `identity`, and its `Plan` or cutter if steps are re-cut.
    _packs: bool
    _identity: Any
    _cutter: Any = None
    cut_reason = ""  # why steps are not re-cut
    _own_collator = False  # whether the user's data collator makes the batches

    @contextmanager
    def _undone_if_refused(self, model: Any) -> Iterator[None]:
        """Leave a model that a caller gave as it was if the run is refused in a `with` block, once it is built."""
        own = model if isinstance(model, nn.Module) else nn.Module()
        trained, before, given = [(p, p.requires_grad) for p in own.parameters()], find_state(own), dict(vars(self))
        try:
            yield
        except PackingError:
            for name, held in vars(self).items():
                parts = held.modules() if name not in given and isinstance(held, nn.Module) else ()
                if any(isinstance(part, PreTrainedModel) for part in parts):
                    unpatch(held)
            built = vars(self).get("model")
            if own is model and isinstance(built, PeftModel) and built is not model:
                built.unload()
            restore_patch(own, before)
            for parameter, trains in trained:
                parameter.requires_grad_(trains)
            raise

    def _build(
        self, model: Any, args: CommonConfig, given: dict[str, Any], *, user_args: Any, task: str | None = None
    ) -> None:
        """Run TRL's `__init__` with the model loaded and adapted as the config says; refuse a model that does not fit.

        `given` are the trainer's other arguments, `user_args` is the config that the user passed; see
        [`loading_as_configured`].
        """
        with loading_as_configured(model, args, given, user_args=user_args, task=task):
            super().__init__(**given | {"model": model, "args": args})
        require_trained(self.model, given)
        if args.packing:
            require(BUILT, self._as_built)

    @property
    def _as_built(self) -> Training:
        """The run as it is now."""
        given = {"compute_loss_func": self.compute_loss_func, "compute_metrics": self.compute_metrics}
        return Training(self.args, type(self).__name__, model=self.model, given=given, trainer=self)

    def _tell_padded(self, refusal: PackingError) -> None:
        """Say why a run that did not ask for packing is padded."""
        why = f" ({'; '.join(refusal.why)})" if refusal.why else ""
        padded = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("trl."))
        logger.warning(
            "trl-packfa: %s%s. Training as %s would: padded, without a default adapter.",
            refusal.what.removesuffix("."), why, padded,
        )  # fmt: skip

    def replaced(self, *names: str) -> str:
        """Describe the first of these methods that a subclass or a late change has replaced; `""` if none was."""
        ours = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("trl_packfa."))
        found = (n for n in names if n in vars(self) or getattr(type(self), n) is not getattr(ours, n))
        return next((f"{name} of {type(self).__name__} is not TRL's" for name in found), "")

    def _why_kept(self) -> str:
        """Return the reason why micro-batches stay as in the padded run, as the trainer is now; `""` if none."""
        return self.replaced(*HOOKS)

    # Data ------------------------------------------------------------------------------------------------------------

    def follow_batch_size(self) -> int:
        """Return the batch size of one device now, which the budget follows: `auto_find_batch_size` lowers it."""
        size = self._train_batch_size
        if self.accelerator.split_batches:  # accelerate's batch size is that of all devices together
            size = max(size // self.args.data_parallel_size, 1)
        if self._cutter is not None:
            self._cutter.use_batch_size(size)
        return size

    def get_train_dataloader(self) -> DataLoader:
        """Return the training loader. If steps are planned, it yields the micro-batches of this rank's plan."""
        size, collator, plan = self.follow_batch_size(), self.data_collator, self._cutter
        plans = isinstance(plan, Plan)
        if plan is not None and not plans:
            collator = plan.loading(collator)
        if not self._plans_batches:
            with set_inside(self, data_collator=collator):
                return super().get_train_dataloader()
        dataset: Any = self._remove_unused_columns(self.train_dataset, "training")
        sampler: Any = self._get_train_sampler(dataset)
        sampler = SequentialSampler(dataset) if sampler is None else sampler  # as torch does
        if plans:
            dataset, collator = StepRows(dataset, plan, collator), itemgetter(0)
        # Rows of `bfd`, and transformers' batch_rebalance, are batches of this rank already.
        if not isinstance(sampler, (PackedBatchSampler, *REBALANCES)):
            require_length(sampler)
            sampler = StepSampler(sampler, self.args, self.accelerator, size=size, plans=plans)
        return rank_loader(dataset, sampler, collator, self.args, self.accelerator)

    @property
    def _plans_batches(self) -> bool:
        """`True` if the batches of a rank are planned here, not dealt by accelerate."""
        return self._cutter is not None and not isinstance(self.train_dataset, IterableDataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return the batches of one optimizer step, and its number of items; cut here what could not be planned."""
        if self._cutter is None or isinstance(self._cutter, Plan):
            found = super().get_batch_samples(epoch_iterator, num_batches, device)
            require_whole_step(found[0], self.args)
            return found
        read = list(islice(epoch_iterator, num_batches))
        if read and isinstance(read[0], list):  # otherwise of a user's own loader
            read = self._cutter.batches(read, self.data_collator)
        return read, self._get_num_items_in_batch(read, device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count a batch's operations as the Trainer does. Parameters are walked once, not for each batch."""
        name = getattr(self.model, "main_input_name", "input_ids")  # as the Trainer asks
        if self._operations is None:
            self._operations = super().floating_point_ops({name: torch.empty(1)})
        return self._operations * sum(part[name].numel() for part in micro_batches_of(inputs) if name in part)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count a batch as the Trainer does. Without a mask the Trainer would tell pads by their id."""
        for batch in micro_batches_of(inputs):
            if self.args.include_num_input_tokens_seen == "non_padding" and "input_ids" in batch:
                batch = {**batch, "attention_mask": torch.tensor(count_true_tokens(batch))}
            super()._track_num_input_tokens(batch)

    def _count_tokens(self, inputs: dict[str, Any], *, before: int) -> None:
        """Count a micro-batch's true tokens, and not what TRL has counted since `before`: padding, and shared rows."""
        self._total_train_tokens = before
        if inputs and self.args.process_index % self.args.sequence_parallel == 0:  # of a group the first rank counts
            self._unsettled += count_true_tokens(inputs)
        if self.accelerator.num_processes == 1:
            self._settle_tokens()

    def _settle_tokens(self) -> None:
        """Add up what all ranks have counted since the last call. Every rank calls this, as it may wait."""
        tokens = int(summed(self.accelerator, {"tokens": self._unsettled})["tokens"])
        self._unsettled = 0
        self._total_train_tokens += tokens
        if tokens or "num_tokens" in self._metrics["train"]:
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]

    def name_rows(self) -> None:
        """Look at the images of the datasets, and let the collator name rows, unless it is the user's own."""
        in_parts = self.is_fsdp_enabled or getattr(self.args.deepspeed_plugin, "zero_stage", 0) == 3
        for name, dataset in named_datasets(self.train_dataset, self.eval_dataset):
            look_at_images(dataset, name=name, requires_images=in_parts)
        if not self._own_collator:
            self.data_collator = NamingCollator(self.data_collator, requires_images=in_parts)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        kept = super()._remove_unused_columns(dataset, description)
        return NumberedRows(kept, (description or "given").lower()) if self._is_vision_dataset else kept

    def _prepare_input(self, data: Any) -> Any:
        # The loader moves only the batches that it makes. The batches of a re-cut step are made between two steps.
        return super()._prepare_input(data.to(self.args.device) if isinstance(data, CountedBatch) else data)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        # Samplers read lengths from the columns of the dataset itself.
        dataset: Any = train_dataset.dataset if isinstance(train_dataset, NumberedRows) else train_dataset
        return super()._get_train_sampler(dataset)

    # Runs and checkpoints --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; `True`, `"true"` and `"last"` resume from the last whole checkpoint.

        Raises:
            [`UnsupportedModel`], [`ContaminationError`]: if a model is not exact, or no longer patched.
            [`InvalidConfig`]: if there is no whole checkpoint to resume from, if the named folder is no checkpoint or
                its files have changed, or if it is from a run on other data or labels, or with another adapter.
        """
        self._settle_late()
        self._resumed_from = self._checkpoint_to_resume(resume_from_checkpoint)
        saves = self.args.should_save and self.args.save_strategy != "no"  # otherwise no file can be damaged
        with self._before_training(), only_run_in(self.args.output_dir if saves else None, self.accelerator):
            return super().train(self._resumed_from, *args, **kwargs)

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, or `None` to start anew; set the token count to the checkpoint's."""
        checkpoint = from_main_rank(self.accelerator, lambda: checkpoint_to_resume(asked, self.args.output_dir))
        if checkpoint is None:
            return None
        message = from_main_rank(self.accelerator, lambda: resuming_message(checkpoint))
        logger.info("trl-packfa: %s", message)
        from_main_rank(self.accelerator, lambda: tell_left_out(checkpoint))
        progress = from_main_rank(self.accelerator, lambda: read_progress(checkpoint))
        from_main_rank(self.accelerator, lambda: tell_changed(progress.get("settings", {}), self.args))

        def require_same() -> None:
            require_same_adapter(progress, self.model)
            if self._packs and not self.args.ignore_data_skip:
                require_same_run(progress, self._identity)

        agree(self.accelerator, require_same)  # the documents of one rank may be others
        # Otherwise TRL would count from 0 again.
        self._total_train_tokens = progress.get("num_tokens", 0)
        return checkpoint

    def _settle_late(self) -> None:
        """Settle again what may have changed since construction. Stock trainers read it when they use it."""
        if self._cutter is not None and (why := self._why_kept()):
            keep_padded(self.args, why)
            self._cutter, self.cut_reason = None, why

    def _before_training(self) -> AbstractContextManager[Any]:
        """Return the context in which TRL trains."""
        return nullcontext()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save TRL's checkpoint, mark it whole once every rank has written its part, then delete older ones.

        The model card, the run's progress and its [`identity`] are added.
        """
        self._settle_tokens()
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with whole_checkpoint(folder, self):
            super()._save_checkpoint(model, trial)
            self._save_state(folder)
            if self.args.should_save:
                card, empty = Path(self.args.output_dir) / "README.md", folder / "README.md"
                if card.exists() and empty.exists():  # the template that PEFT writes next to an adapter
                    empty.write_text(card.read_text(encoding="utf-8"), encoding="utf-8")
                progress = {"num_tokens": self._total_train_tokens, "adapter": adapter_of(self.model)}
                settings = {"settings": settings_of(self.args)}
                write_json(folder / PROGRESS, {**progress, **settings, **self._identity})

    def _save_state(self, folder: Path) -> None:
        """Write a rank's own state into a checkpoint."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does; the run's reports lie beside it. Checkpoints get theirs last."""
        super().save_model(output_dir, _internal_call)
        if self._packs and self.args.should_save and not _internal_call:
            self.save_reports(output_dir or self.args.output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section on packing and its check."""
        card: Any = super().create_model_card
        card(*args, **kwargs)
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "README.md"
            base = inspect.model_config(self.model).name_or_path or ""
            text = name_base(path.read_text(encoding="utf-8"), base, run=path.parent.name)
            section = self._card_section() if self._packs else None
            path.write_text(add_section(text, section) if section else text, encoding="utf-8")

    @figure("section on packing in the model card")
    def _card_section(self) -> str:
        settings, said = self.args.card_settings, self._check_as_text()
        return packing_section(settings, self.packing_reports, self.check_report, said=said)

    def _check_as_text(self) -> str:
        """Return the card's sentence on the check, for a run without a report."""
        return ""

    def save_reports(self, folder: str | Path) -> None:
        """Write `packing_report.json` and, once checked, `check_report.json` into a folder."""
        if self.check_report is not None:
            write_json(Path(folder) / "check_report.json", self.check_report.to_dict())
        reports: dict[str, Any] = {name: report.to_dict() for name, report in self.packing_reports.items()}
        if self.packing_plan:
            reports["plan"] = dict(self.packing_plan)
        write_json(Path(folder) / PACKING_REPORT, reports)
