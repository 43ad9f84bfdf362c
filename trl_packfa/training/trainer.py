"""`PackedSFTTrainer`: TRL's `SFTTrainer` with packing, patching, proof and LoRA on together.

What it adds happens in four places: arguments are settled and refused before any data is touched, datasets are cut
with every loss counted, the model is patched once TRL has built it, and the proof runs before the first step.
Tokenizing, losses, metrics, checkpoints and distribution stay TRL's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset
from peft import PeftConfig, PeftModel
from transformers import (
    BitsAndBytesConfig,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)

from ..api import describe, patch
from ..collator import DataCollatorForPacking
from ..errors import ContaminationError, InvalidConfig, NoBackend, UnsupportedModel
from ..packing import PackedBatchSampler, PackingReport
from ..patching import inspect
from ..runtime.compile import let_layers_differ
from .checkpointing import read_progress, whole_checkpoint, write_progress, write_reports, write_stream_state
from .config import PackedSFTConfig
from .dataset import read_lengths
from .distributed import TrainBeginCallback, from_main_rank, require_same_documents
from .epoch_plan import summarize_plan
from .exactness_gate import ProvingTrainer
from .flops import quadratic_weight
from .guards import only_run_in
from .model_card import add_packing_section, copy_card, name_base, packing_section
from .model_loading import AnyDataset, EvalDataset, default_adapter, loading, model_type, named, output_dir, usable
from .parallelism import refuse_uneven_calls
from .plain_config import AsGiven, asks_for_packing, padded, settle, tell_padded
from .preflight import checkpoint_to_resume, load_tokenizer, require_markable, require_reporters, told_resuming
from .resuming import identity, require_same_run
from .sampler import EpochCallback
from .step_packing import StepCutter, longest_of_stream
from .streaming import PackedStream, resumes_by_state
from .validation import (
    refuse_arguments,
    refuse_collator,
    refuse_data,
    refuse_loss_function,
    refuse_model,
    refuse_noise,
    refuse_precision,
    refuse_sources,
    refuse_untrainable,
)

logger = get_logger(__name__)


class PackedSFTTrainer(ProvingTrainer):
    """Swap it for `SFTTrainer`: the same arguments, packed.

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

    All arguments are TRL's. A plain `SFTConfig` or `TrainingArguments` is taken as a [`PackedSFTConfig`]. A model
    given by name is loaded with the config's `dtype`, `attn_implementation` and quantization; an adapter is added
    unless the model has one, `peft_config` says which, or `use_peft=False`.

    Attributes:
        packing_reports (`dict[str, PackingReport]`): by dataset name, what went in, what came out and what was lost.
        packing_plan (`dict[str, float]`): what an epoch comes to: steps, examples a step, micro-batches, fill.
        exactness (`ExactnessReport` or `None`): the proof, once [`~PackedSFTTrainer.train`] has run it.

    Raises:
        [`PackingError`]: at construction, if arguments, model or data cannot be packed exactly; the message says why.
    """

    _tag_names = ["trl", "sft", "trl-packfa"]

    # What the Trainer declares more loosely.
    args: PackedSFTConfig
    model: Any
    train_dataset: Any
    data_collator: Any
    _tokenizer: Any
    _signature_columns: Any

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
        datasets = named(train_dataset, eval_dataset)
        directory, as_given = output_dir(model), AsGiven(model)

        def refuse(packed: PackedSFTConfig) -> None:
            if packed.packing:
                refuse_arguments(
                    packed,
                    compute_metrics=compute_metrics,
                    peft_config=peft_config,
                    compute_loss_func=compute_loss_func,
                )
                for name, dataset in datasets:
                    refuse_data(dataset, name=name)
                if packed.packs_steps and isinstance(train_dataset, IterableDataset):
                    longest_of_stream(packed)
                refuse_model(model_type(model, packed) if isinstance(model, str) else model, packed)
                refuse_collator(data_collator)

        refuse_untrainable(model, peft_config)
        settled, refusal = settle(args, directory, refuse)
        require_reporters(settled)
        if settled.assistant_only_loss and (processing_class is not None or isinstance(model, str)):
            require_markable(processing_class or load_tokenizer(str(model), settled), settled)
        train_dataset, eval_dataset = usable(
            train_dataset, eval_dataset, args=settled, formatted=formatting_func is not None
        )
        options = {
            "data_collator": data_collator,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "callbacks": callbacks,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "formatting_func": formatting_func,
        }
        if refusal is None:
            try:
                self._construct(model, settled, **options)
                return
            except (UnsupportedModel, ContaminationError, NoBackend, InvalidConfig) as late:
                if asks_for_packing(args):
                    raise
                model, settled, refusal = as_given.restore(vars(self).get("model")), padded(args, directory), late
        tell_padded(refusal)
        self._construct(model, settled, **options)

    def _construct(self, model: Any, args: PackedSFTConfig, *, data_collator: Any, **options: Any) -> None:
        """TRL's construction, with the model loaded and adapted as the arguments say, then packed."""
        kind = model_type(model, args) if isinstance(model, str) else None
        if kind is not None:
            quantization: Any = options["quantization_config"]
            args.model_init_kwargs, options["quantization_config"] = loading(kind, args, quantization)
        if options["peft_config"] is None and not isinstance(model, PeftModel):
            options["peft_config"] = default_adapter(kind or inspect.model_type(model), args)  # type: ignore[arg-type]
        self.packing_reports: dict[str, PackingReport] = {}
        self.packing_plan: dict[str, float] = {}
        self.packing_sampler: PackedBatchSampler | None = None
        self._uncut: dict[str, Any] = {}
        self._stream: PackedStream | None = None
        self._resumed_from: str | None = None
        # Logits for metrics come example by example, so evaluation is padded then (and refused if asked packed).
        self._packs_eval = args.packing and args.eval_packing is not False and options["compute_metrics"] is None
        super().__init__(model=model, args=args, data_collator=None if args.packing else data_collator, **options)
        if args.packing:
            self._pack(data_collator)

    def _pack(self, data_collator: Callable[[list[Any]], dict[str, Any]] | None) -> None:
        """Patch the model that TRL built and collate documents into rows."""
        self._require_known_tokens()
        refuse_precision(
            self.model,
            self.args,
            scales_losses=self.accelerator.scaler is not None,
            own_optimizer=self.optimizer is not None or self.optimizer_cls_and_kwargs is not None,
        )
        if not self.is_zero3_enabled:
            self._choose_head(self.model)
        patch(self.model, backend=self.args.attention_backend, fused_lora=self.args.fused_lora)
        if self.aux_loss_enabled and not self.is_zero3_enabled:
            self._require_balancing()
        if self.compute_loss_func is not None:
            refuse_loss_function(
                self.compute_loss_func,
                vocabulary=inspect.model_config(self.model).get_text_config().vocab_size,
                device=self.args.device,
            )
        if self.neftune_noise_alpha is not None:
            refuse_noise(self.model)
        if self.args.torch_compile:
            let_layers_differ(inspect.model_config(self.model).get_text_config().num_hidden_layers)
        if self.is_proven_wrapped:
            refuse_uneven_calls(self.model, getattr(self.accelerator.state, "fsdp_plugin", None))
        # TRL's collator for padded batches, which evaluation with metrics uses.
        self._padding_collator = copy.copy(self.data_collator)
        self._padding_collator.padding_free = False
        self.data_collator = data_collator or DataCollatorForPacking(
            pad_token_id=self._tokenizer.pad_token_id,
            pad_to_multiple_of=self.args.pad_to_multiple_of,  # type: ignore[arg-type]  # SFTConfig has made it an int
            source_column=self.args.loss_by,
            vocab_size=inspect.known_ids(self.model),
        )
        refuse_sources(self.args, self.train_dataset)
        if self.args.packs_steps:
            self._step_cutter = StepCutter(
                self.args,
                train_dataset=self.train_dataset,
                model=self.model,
                accelerator=self.accelerator,
                cut=self._cut,
            )
        self.packing_plan = self._plan()
        self.add_callback(EpochCallback(lambda: self.packing_sampler))
        self.add_callback(TrainBeginCallback(self._require_proof, self._scale_noise))
        logger.info("trl-packfa: patched\n%s", describe(self.model))

    def _plan(self) -> dict[str, float]:
        """What an epoch comes to; nothing for a stream, whose length is not known."""
        if self.train_dataset is None or isinstance(self.train_dataset, IterableDataset):
            return {}
        lengths = read_lengths(self.train_dataset)
        require_same_documents(self.accelerator, lengths)
        plan = summarize_plan(self.args, lengths, quadratic=quadratic_weight(self.model), cut=self._cut)
        logger.info("trl-packfa: %s", ", ".join(f"{name} {value:,.4g}" for name, value in plan.items()))
        return plan

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`, after the exactness check, if it has not run yet; `resume_from_checkpoint=True` (or `"true"`,
        `"last"`) takes the last checkpoint that was written whole.

        Raises:
            [`ContaminationError`]: if packing is not exact on this model.
            [`InvalidConfig`]: if there is no whole checkpoint to resume from, or none in the folder that is named.
        """
        asked, folder = resume_from_checkpoint, self.args.output_dir
        resume_from_checkpoint = from_main_rank(self.accelerator, lambda: checkpoint_to_resume(asked, folder))
        self._resumed_from = resume_from_checkpoint
        if resume_from_checkpoint is not None:
            logger.info("trl-packfa: %s", told_resuming(resume_from_checkpoint))
            progress = read_progress(resume_from_checkpoint)
            if self.args.packing and not self.args.ignore_data_skip:
                require_same_run(progress, self._identity)
            # TRL counts from 0 again.
            self._total_train_tokens = progress.get("num_tokens", 0)
        if not self.is_proven_wrapped:
            self._require_proof()
        saves = self.args.should_save and self.args.save_strategy != "no"
        with only_run_in(self.args.output_dir) if saves else nullcontext():  # type: ignore[arg-type]
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @cached_property
    def _identity(self) -> dict[str, str]:
        return identity(self.train_dataset, self._tokenizer)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """TRL's, whole only once every rank has written its part; older checkpoints go after that."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with whole_checkpoint(folder, self):
            super()._save_checkpoint(model, trial)
            if self._stream is not None and resumes_by_state(self._stream.source):
                write_stream_state(folder, self.args, self._stream.state_dict())
            if self.args.should_save:
                copy_card(self.args.output_dir, folder)
                write_progress(folder, {"num_tokens": self._total_train_tokens, **self._identity})

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card, with a section on packing and its proof."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            name_base(self.args.output_dir, inspect.model_config(self.model)._name_or_path)
        if self.args.packing and self.is_world_process_zero():
            add_packing_section(self.args.output_dir, packing_section(self.args, self.packing_reports, self.exactness))

    def save_reports(self, folder: str | Path) -> None:
        """Write `packing_report.json` and, once proven, `exactness_report.json` into a folder."""
        write_reports(folder, self.packing_reports, self.exactness, plan=self.packing_plan)
