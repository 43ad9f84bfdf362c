"""Settle a trainer's arguments, and refuse invalid ones, before any data or weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from ..errors import PackingError
from ..patching import inspect
from .config import PackedSFTConfig
from .dataset import prepares
from .model_loading import AnyDataset, EvalDataset, default_adapter, loading, model_type, named, output_dir
from .plain_config import settle
from .preflight import require_attention, require_reporters, require_tokenizer
from .step_packing import longest_of_stream
from .validation import refuse_arguments, refuse_collator, refuse_data, refuse_model, refuse_untrainable


def settle_arguments(
    model: str | PreTrainedModel | PeftModel,
    args: TrainingArguments | None,
    *,
    train_dataset: AnyDataset | None,
    eval_dataset: EvalDataset | None,
    data_collator: Callable[[list[Any]], dict[str, Any]] | None,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    compute_loss_func: Callable | None,
    compute_metrics: Callable | None,
    peft_config: PeftConfig | None,
    formatting_func: Callable[..., Any] | None,
) -> tuple[PackedSFTConfig, PackingError | None]:
    """Return the config to train with: packed if possible, else padded if the user did not ask for packing.

    Args:
        model, args, train_dataset, eval_dataset, data_collator, processing_class, compute_loss_func, compute_metrics,
        peft_config, formatting_func:
            The arguments of the trainer.

    Returns:
        The config, and the error that explains why it is padded, or `None` if it is as the user asked.

    Raises:
        [`PackingError`]: if the user asked for packing and it is not possible, or if the run cannot be trained at all.
    """

    def refuse(packed: PackedSFTConfig) -> None:
        if not packed.packing:
            return
        refuse_arguments(
            packed, compute_metrics=compute_metrics, peft_config=peft_config, compute_loss_func=compute_loss_func
        )
        for name, dataset in named(train_dataset, eval_dataset):
            refuse_data(dataset, name=name)
        if packed.strategy.recuts_steps and isinstance(train_dataset, IterableDataset):
            # Called only for its refusal, before weights are loaded. `StepCutter` calls it again.
            longest_of_stream(packed)
        refuse_model(model_type(model, packed) if isinstance(model, str) else model, packed)
        refuse_collator(data_collator)

    refuse_untrainable(model, peft_config)
    settled, refusal = settle(args, output_dir(model), refuse)
    require_reporters(settled)
    require_attention(settled)
    require_tokenizer(
        model, settled, processing_class=processing_class, datasets=named(train_dataset, eval_dataset),
        makes_text=formatting_func is None and prepares(settled),
    )  # fmt: skip
    return settled, refusal


def load_as_asked(
    model: str | PreTrainedModel | PeftModel, args: PackedSFTConfig, *, quantization: Any, adapter: PeftConfig | None
) -> tuple[Any, PeftConfig | None]:
    """Return the quantization and the adapter for TRL to load the model with, and set `args.model_init_kwargs`.

    Args:
        model, args:
            A model given by name is loaded as the arguments say.
        quantization (`BitsAndBytesConfig`, *optional*), adapter (`PeftConfig`, *optional*):
            The user's own. They win over the arguments.
    """
    kind = model_type(model, args) if isinstance(model, str) else None
    if kind is not None:
        args.model_init_kwargs, quantization = loading(kind, args, quantization)
    if adapter is None and not isinstance(model, PeftModel):
        adapter = default_adapter(kind or inspect.model_type(model), args)  # type: ignore[arg-type]
    return quantization, adapter
