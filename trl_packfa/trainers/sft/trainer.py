"""`PackedSFTTrainer`: TRL's `SFTTrainer` with packing, patching, the check and LoRA on by default.

The class only overrides TRL's hooks: tokenizing, losses, metrics, checkpoints and distribution stay TRL's. Each hook
calls the part that does the work:

    construction, settling  choose the config, and refuse before weights are read what the requirements exclude
    PackedRun               builds the trainer or the padded one, resumes, saves whole checkpoints and cards
    PackedData              cuts datasets and counts every dropped token; makes samplers, loaders, collators
    StepPlan, StreamCutter  cut the documents of an optimizer step into micro-batches
    LossHead, PaddedTerms   compute the loss as the padded run does; SourceLosses reports it by source
    CheckGate               runs the check before the first step
    SpeedMeter, LossWatch   measure tokens per second; refuse a loss that is NaN or infinite
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from peft import PeftConfig, PeftModel
from torch.utils.data import DataLoader, Sampler
from transformers import (
    BitsAndBytesConfig,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)

from ...api import patch
from ...checking import CheckReport
from ...config.arguments import ARGUMENTS
from ...config.requirements import require
from ...config.sft import PackedSFTConfig
from ...data.batching import KEPT
from ...data.collator import ROW_LENGTHS, SOURCES, count_batch, take_losses
from ...data.dataloading import PackedData, copies_without_waiting, send
from ...data.dataset import AnyDataset, EvalDataset, read_lengths, take_apart, without_our_columns
from ...data.epoch_plan import summarize_plan
from ...data.flops import quadratic_weight
from ...data.origins import ORIGINS
from ...data.prepared import Prepared
from ...data.raw_dataset import usable
from ...data.step_cutting import StepPlan, StreamCutter, how_to_cut, keep_padded
from ...data.steps import micro_batches_of, run_batch
from ...data.templates import left_out_by_template, named_conversations, naming_conversations
from ...errors import InvalidConfig, PackingError, figure
from ...override import set_inside
from ...packing import PackedBatchSampler, PackingReport
from ...parallel.ranks import refuse_short_rows, require_same_documents, share_rows, summed
from ...parallel.trainer import ShardedRowsTrainer
from ...patching import inspect
from ...patching.describe import describe
from ..requirements.built import BUILT, PATCHED
from ..requirements.runs import SETUP
from ..saving.resuming import identity
from .check_gate import CheckGate
from .construction import settle_arguments
from .images import ROW_WEIGHTS, ImageCutter, TrainsOnImages
from .lm_head import LossHead, drop_unmeasured
from .loss_terms import PaddedTerms, SourceLosses, WeightedModel, counted_labels, example_weights
from .model_code import apply_liger, changed_already, compile_by_layer
from .run_callback import RunCallback
from .throughput import LossWatch, SpeedMeter, memory_advice

logger = get_logger(__name__)


class PackedSFTTrainer(TrainsOnImages, ShardedRowsTrainer):
    """TRL's `SFTTrainer` with packing. It takes the same arguments; training matches padded training.

    ```python
    from datasets import load_dataset
    from trl_packfa import PackedSFTConfig, PackedSFTTrainer

    trainer = PackedSFTTrainer(
        "meta-llama/Llama-3.2-1B",
        args=PackedSFTConfig("out", load_in_4bit=True),
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
    )
    trainer.train()
    ```

    All arguments are TRL's. A plain `SFTConfig` or `TrainingArguments` is read as a [`PackedSFTConfig`]. A model given
    by name is loaded with the config's `dtype`, `attn_implementation` and quantization. The trainer adds a LoRA
    adapter, except if the model already has one, if `peft_config` is given, with `use_peft=False`, or if an optimizer
    is passed that holds parameters of the model.

    Attributes:
        packing_reports (`dict[str, PackingReport]`): by dataset name, documents and tokens in, out and lost.
        packing_plan (`dict[str, float]`): numbers of an epoch: steps, examples per step, micro-batches, fill.
        check_report (`CheckReport` or `None`): the check, once [`~PackedSFTTrainer.train`] has run it.

    Raises:
        [`PackingError`]: at construction, if arguments, model or data cannot be packed exactly. The message says why.
    """

    _tag_names = ["trl", "sft", "trl-packfa"]

    # The Trainer declares these types more loosely.
    args: PackedSFTConfig
    _signature_columns: Any

    # Whether TRL's own, padded rows are trained, because the user's code gets them; and what steps are cut for.
    _pads_rows = False
    _cut_for: Any = None

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: PackedSFTConfig | TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[dict], str] | None = None,
    ) -> None:
        given = locals().copy()  # the other arguments, by name
        del given["self"], given["model"], given["args"]
        settled, refusal, on_images = settle_arguments(model, args, given)
        given |= usable(train_dataset, eval_dataset, settled, formatted=formatting_func is not None)
        if refusal is not None:
            self._tell_padded(refusal)
        with self._undone_if_refused(model):
            self._construct(model, settled, user_args=args, **given)
        if on_images is not None:
            self.run_images_without_pads(on_images)

    def _construct(
        self,
        model: Any,
        args: PackedSFTConfig,
        *,
        user_args: TrainingArguments | None,
        data_collator: Any,
        **options: Any,
    ) -> None:
        """Run TRL's `__init__` with the model loaded and adapted as the arguments say, then set packing up."""
        self._packs, self._own_collator = args.packing, data_collator is not None
        self.compute_metrics = options["compute_metrics"]
        self._data = PackedData(args, packs_eval=lambda: self._packs_eval)
        self._terms: PaddedTerms | None = None
        share_rows(args)
        collator = None if args.packing else data_collator
        self._build(model, args, options | {"data_collator": collator}, user_args=user_args)
        self._gate = CheckGate(self)
        self._head = LossHead(self.args, self.accelerator)
        self._sources = SourceLosses(self.accelerator)
        self._speed = SpeedMeter(self.model, self.args, world_size=self.args.world_size)
        self._loss_watch = LossWatch()
        self._run = RunCallback(self)
        self.add_callback(self._run)
        if args.packing:
            self._pack(data_collator)

    def _pack(self, data_collator: Callable[[list[Any]], dict[str, Any]] | None) -> None:
        """Patch the model that TRL built, and install packing's collator, loss parts and callbacks."""
        args, model = self.args, self.model
        self.data_collator = self._data.meet(
            model,
            pad_token_id=self._tokenizer.pad_token_id,
            padding_collator=self.data_collator,
            collator=data_collator,
            counts_first_labels=not self._loss_shifts_labels,
        )
        if not self.is_zero3_enabled:  # under ZeRO-3 only the engine runs the model, and `train` builds it
            self._head.choose(model)
        apply_liger(model, args)  # before the patch: later the Trainer would replace the patch's forwards by Liger's
        self._gate.switch_checkpointing(model)
        self._pads_rows = self._wants_rows()
        self._patch(unpad=args.share_prefixes)  # prefixes are checked with padded rows
        if not self.is_zero3_enabled:  # there accelerate compiles the whole model
            compile_by_layer(model, args, self.accelerator)
        self._terms = PaddedTerms(args, self.accelerator, model, balances_experts=self.aux_loss_enabled)
        if self.aux_loss_enabled and not self.is_zero3_enabled:
            self.aux_loss_enabled = self._terms.find_routers(has_own_head=self._head.scores_own_logits)
            inspect.model_config(model).get_text_config().output_router_logits = self.aux_loss_enabled
        require(PATCHED, self._as_built)
        self.packing_plan = self._plan(self._choose_cut())
        logger.info("trl-packfa: patched\n%s", figure("description of the patch")(describe)(model))

    def _patch(self, *, unpad: bool) -> None:
        """Patch the model. If the user's own code gets padded rows, it computes no pads, where it can do without."""
        with self.accelerator.autocast():  # if `patch` has to check the model, its check is the run's check
            try:
                patch(self.model, unpad=unpad or self._pads_rows, **self.args.patch_options)
            except PackingError as error:
                if unpad or not self._pads_rows:
                    raise
                logger.warning("trl-packfa: pads are computed: %s", "; ".join([error.what, *error.why]))
                patch(self.model, **self.args.patch_options)

    def _wants_rows(self) -> bool:
        """Tell whether the user's own code gets TRL's padded rows, because it may not be written for packed ones.

        Filled rows are TRL's packed rows, too. Examples of several documents, of sources, or of an own collator stay.
        """
        args, train_dataset = self.args, self.train_dataset
        packed = args.strategy.fills_rows or args.share_prefixes or args.sequence_parallel > 1 or args.loss_by
        if not self._why_kept() or packed or self._own_collator:
            return False
        return ROW_LENGTHS not in (train_dataset.column_names or list(next(iter(train_dataset), {})))

    def _choose_cut(self) -> str:
        """Choose how steps are cut by what makes the loss now; return it. A late change may have replaced it."""
        args, hook = self.args, self._why_kept()
        cut, why = how_to_cut(
            args,
            balances_experts=self.aux_loss_enabled,
            counts_tokens=self.model_accepts_loss_kwargs,
            own_loss=self.compute_loss_func is not None,
            world_size=args.data_parallel_size,
        )
        if not args.strategy.recuts_steps:
            return cut
        settings = (hook, cut, args.max_tokens_per_microbatch, args.per_device_train_batch_size, self.train_dataset,
                    self.neftune_noise_alpha)  # fmt: skip
        if settings != self._cut_for:
            self._cut_for = settings
            if hook:
                keep_padded(args, hook)
            cutter = StreamCutter if isinstance(self.train_dataset, IterableDataset) else StepPlan
            self._cutter = None if hook else cutter(self, cut=cut, why=why)
        return KEPT if hook else cut

    def _plan(self, cut: str) -> dict[str, float]:
        """Plan an epoch and log its numbers; return an empty dict for a stream, whose length is not known."""
        if self.train_dataset is None or isinstance(self.train_dataset, IterableDataset):
            return {}
        lengths = read_lengths(self.train_dataset)
        require_same_documents(self.accelerator, lengths)
        refuse_short_rows(self.args, self._data.batching.micro_batch_tokens(lengths))
        plan = summarize_plan(self.args, lengths, quadratic=quadratic_weight(self.model), cut=cut) or {}
        logger.info("trl-packfa: %s", ", ".join(f"{name} {value:,.4g}" for name, value in plan.items()))
        return plan

    # Data ------------------------------------------------------------------------------------------------------------

    @property
    def packing_reports(self) -> dict[str, PackingReport]:
        """Packing reports by dataset name: documents and tokens in, out and lost; of images what has trained."""
        return self._cutter.reports if isinstance(self._cutter, ImageCutter) else self._data.reports

    @property
    def packing_sampler(self) -> PackedBatchSampler | None:
        """The sampler of rows that are filled over the whole dataset; `None` before the loader has made it."""
        return self._data.sampler

    def _prepare_dataset(
        self,
        dataset: AnyDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: PackedSFTConfig,
        packing: bool,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> AnyDataset:
        """Let TRL tokenize and label a dataset, then cut it ourselves to count every dropped token.

        One that `trl-packfa prepare` has made is taken as it is.
        """
        if args.packing and (prepared := Prepared.of(dataset)) is not None:
            return self._data.take(dataset, prepared, self._tokenizer, self.chat_template, name=dataset_name)
        for sentence in left_out_by_template(dataset, processing_class, self.chat_template) or ():
            logger.warning("trl-packfa: %s: %s", dataset_name, sentence)
        by_trl = super()._prepare_dataset
        options: Any = {"name": dataset_name, "tokenizer": processing_class, "chat_template": self.chat_template,
                        "assistant": args.assistant_only_loss}  # fmt: skip
        dataset = dataset if formatting_func is not None else named_conversations(dataset, **options)
        if not args.packing:
            with naming_conversations(dataset, **options):
                return by_trl(dataset, processing_class, args, packing, formatting_func, dataset_name)

        def tokenize(uncut: PackedSFTConfig) -> AnyDataset:
            with naming_conversations(dataset, **options):
                given = without_our_columns(dataset)
                given = self._data.expand(given, self._tokenizer, self.chat_template, name=dataset_name)
                return by_trl(given, processing_class, uncut, False, formatting_func, dataset_name)

        return self._data.prepare(tokenize, name=dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [name for name in self._data.columns if name not in self._signature_columns]

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if not self.args.strategy.fills_rows:
            return super()._get_train_sampler(train_dataset)
        return self._data.row_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def get_train_dataloader(self) -> DataLoader:
        """Return the training loader: the micro-batches of this rank, packed. Those of a stream are cut once read."""
        self._data.batch_size = self.follow_batch_size()
        with set_inside(self, data_collator=self._data.padding_collator) if self._pads_rows else nullcontext():
            if not self.args.packing or not isinstance(self.train_dataset, IterableDataset):
                return super().get_train_dataloader()
            collator: Any = self.data_collator if self._cutter is None else self._cutter.loading(self.data_collator)
            collator = self._get_collator_with_removed_columns(collator, description="training")
            return self._data.stream_loader(self.train_dataset, collator, resumed_from=self._resumed_from)

    @property
    def _plans_batches(self) -> bool:
        return super()._plans_batches or (self.args.packing and not isinstance(self.train_dataset, IterableDataset))

    @property
    def _packs_eval(self) -> bool:
        """`True` if evaluation is packed: nothing needs a row of logits for each example."""
        rows = self.compute_metrics is not None or bool(self.replaced("compute_loss", "prediction_step"))
        return self._data.args.eval_packing is not False and not rows

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the evaluation loader. Batches hold the padded run's examples, packed unless metrics need logits.

        Those of a stream are padded: the Trainer counts its rows, and would weight the loss of a packed one wrongly.
        """
        named = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset = self.eval_dataset if named is None else named
        streamed = isinstance(dataset, IterableDataset)
        pads = self.args.packing and (streamed or not self._packs_eval)
        if pads and not streamed and ROW_LENGTHS in dataset.column_names:  # metrics were set after it was prepared
            eval_dataset = take_apart(dataset, name="eval")
        collator = self._data.padding_collator if pads else self.data_collator
        with set_inside(self, data_collator=collator):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the prediction loader, never packed: predictions need one row of logits per example."""
        with set_inside(self, data_collator=self._data.padding_collator or self.data_collator):
            return super().get_test_dataloader(test_dataset)

    def preview_batch(self) -> str:
        """Show a packed batch of the first training documents as text, with document starts and trained tokens marked.

        The documents are in the dataset's order, not in the run's, and no random number is used.

        Raises:
            [`InvalidConfig`]: with `packing=False`.
        """
        return self._data.preview(self.train_dataset, self.data_collator, self._tokenizer)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        parts = [part for batch in batch_samples for part in micro_batches_of(batch)]
        return super()._get_num_items_in_batch([counted_labels(p, self.args.loss_weighting) for p in parts], device)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run TRL's training step for each micro-batch of a batch."""
        if self.args.packing:
            with self._run.paused():
                self._gate.check_first_batch(model, inputs)
        if (step := getattr(inputs, "step", None)) is not None:
            self.current_gradient_accumulation_steps = step.count  # TRL divides the auxiliary loss by it
            self.check_recut_images(model)
        return run_batch(self, inputs, model, lambda part: self._run_micro_batch(model, part, num_items_in_batch))

    def _prepare_input(self, data: Any) -> Any:
        waits = not copies_without_waiting(self.args)
        return super()._prepare_input(data) if waits else send(data, self.args.device)

    def _run_micro_batch(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Run TRL's training step on one micro-batch, with advice on out-of-memory errors and non-finite losses."""
        self._speed.add(inputs)
        with memory_advice(self.args, inputs, budget=self._cutter and self._cutter.free_budget):
            if (origins := getattr(inputs, "origins", None)) is not None:
                inputs = {**inputs, ORIGINS: origins}
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.args.packing:
            self._loss_watch.add(self.state.global_step + 1, inputs, loss)
            if self._loss_watch.is_full:  # only in a run that rarely logs
                self._loss_watch.require_finite(self._tokenizer)
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute TRL's loss, weighted as `loss_weighting` says, and count the batch for the logged metrics."""
        if self.args.packing:
            self._head.choose(model)  # not chosen yet if the model is evaluated before training
        is_training = self.model.training  # TRL tells training from evaluation in the same way
        mode = "train" if is_training else "eval"
        counted = {**inputs} if is_training and (self._cutter is not None or "packed_layout" in inputs) else None
        before = self._total_train_tokens
        rows = self.args.per_device_train_batch_size if self.args.strategy.fills_rows and is_training else 0
        count_batch(self._metrics[mode], inputs, capacity=rows * (self.args.max_length or 0))
        measured = self._head.measures(self.state, is_training=is_training)
        by_example = self.args.loss_weighting == "example" and is_training
        sources = {name: inputs[name] for name in ("labels", "packed_layout", SOURCES) if name in inputs}
        inputs.pop(SOURCES, None)  # no model takes strings
        called: Any = self._shared(model, inputs)
        called = called if self._terms is None else self._terms.wrap(called, inputs)
        weighted = None
        if by_example or SOURCES in sources:
            # TRL counts a step's examples only for models whose forward takes their number.
            weights = example_weights(inputs, divided_by_tokens=num_items_in_batch is None) if by_example else None
            called = weighted = WeightedModel(called, weights)
        if (row_weights := inputs.pop(ROW_WEIGHTS, None)) is not None:  # of a re-cut micro-batch of images
            called = WeightedModel(called, row_weights[:, None])
        result = super().compute_loss(called, inputs, return_outputs, num_items_in_batch)
        if counted is not None:
            self._count_tokens(counted, before=before)
        if not measured:  # otherwise zeros would enter the logged mean
            drop_unmeasured(self._metrics[mode])
        if weighted is not None and SOURCES in sources and weighted.log_probs is not None:
            self._sources.add(mode, sources, weighted.log_probs)
        return result

    def _add_noise(self) -> None:
        # Rows that are padded have transformers' own noise.
        if self.neftune_noise_alpha is not None and self._terms is not None and not self._pads_rows:
            self.neftune_hook_handle = self._terms.add_noise(self.neftune_hook_handle, self.neftune_noise_alpha)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics, true tokens per second, MFU, and the mean loss of each source since the last log."""
        self._settle_tokens()
        if self.args.loss_by:
            logs.update(self._sources.read("train" if self.model.training else "eval"))
        if "loss" in logs:  # a training log: the host has already waited for the loss
            self._loss_watch.require_finite(self._tokenizer)
            logs.update(self._speed.read(self._total_train_tokens, *self._run.take().tolist()))
        logs.update(self._lost(is_step="loss" in logs))
        super().log(logs, start_time)

    def _lost(self, *, is_step: bool) -> dict[str, float]:
        """Return what a stream has lost since the last log: documents and tokens, of all ranks after a step."""
        mode, dataset = ("train", self.train_dataset) if self.model.training else ("eval", None)
        lost = take_losses(self._metrics[mode])
        if is_step and isinstance(dataset, IterableDataset):
            lost = {name: int(n) // self.args.sequence_parallel for name, n in summed(self.accelerator, lost).items()}
        prefix = "eval_" if mode == "eval" else ""
        return {f"{prefix}{name}": count for name, count in lost.items() if count}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Run TRL's `evaluate`."""
        with changed_already(self.model, self.args):
            return super().evaluate(*args, **kwargs)

    # Check -----------------------------------------------------------------------------------------------------------

    @property
    def check_report(self) -> CheckReport | None:
        """The check, once [`~PackedSFTTrainer.train`] or [`~PackedSFTTrainer.check`] has run it."""
        return self._gate.report

    @property
    def is_zero3_enabled(self) -> bool:
        """`True` if DeepSpeed shards the weights. Then only its engine can run the model, and `train` builds it."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return self.is_deepspeed_enabled and plugin is not None and plugin.zero_stage == 3

    @property
    def is_checked_wrapped(self) -> bool:
        """`True` if the check waits for the wrapped model, because an unsharded one may fit no device."""
        return self.is_fsdp_enabled or self.is_zero3_enabled

    def check(self, checkpoint: str | None = None) -> CheckReport:
        """Run the check on the model as it will train, on every rank, and keep the report.

        Args:
            checkpoint (`str`, *optional*):
                The checkpoint to resume from. Its check is reused if nothing has changed that a check depends on.

        Raises:
            [`ContaminationError`]: if packing is not exact on this model. If it fails on one rank, all ranks raise.
            [`UnsupportedModel`]: under DeepSpeed ZeRO-3 before training has begun.
        """
        return self._gate.check(checkpoint)

    def _require_check(self) -> None:
        if self.args.packing:
            self._head.choose(self.model_wrapped)
            if self.args.check_packing and self.check_report is None:
                self._gate.tell(self.check(self._resumed_from))

    # Runs and checkpoints --------------------------------------------------------------------------------------------

    @contextmanager
    def _before_training(self) -> Iterator[None]:
        if not self.is_checked_wrapped:  # otherwise the callback does it once the model is wrapped
            self._require_check()
        self._speed.start(self._total_train_tokens)
        with changed_already(self.model, self.args):
            yield

    def _settle_late(self) -> None:
        if not self.args.packing:
            return super()._settle_late()
        if self.args is not self._data.args:
            raise InvalidConfig(
                "trainer.args was replaced after construction.",
                why=["the data, the collator and the check were made with the config before"],
                do="Change fields of trainer.args, or build another trainer.",
            )
        require((*ARGUMENTS, *SETUP, *BUILT, *PATCHED), self._as_built)
        assert self._terms is not None, "set up with packing"
        self._terms.balances_experts = self.aux_loss_enabled
        self._pads_rows = self._wants_rows()
        self._choose_cut()

    @cached_property
    def _identity(self) -> dict[str, str]:
        report = self._data.reports.get("train")
        return identity(self.train_dataset, self._tokenizer, trained=report and report.trained_tokens)

    def _save_state(self, folder: Path) -> None:
        self._data.save_state(folder)
