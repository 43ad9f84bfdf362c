"""What `PackedSFTTrainer` refuses before any data is touched, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from .adapters import quantization_config_of, refuse_adapter, refuse_adapters, refuse_quantization
from .attention import AttentionRequest, get_backend
from .boundaries import layout_of
from .config import PackedSFTConfig
from .errors import InvalidConfig, NoBackend, PackingError, UnsupportedModel
from .finding import model_config, model_type
from .parallelism import asked_parallelism, refuse_parallelism, refuse_zero3
from .registry import get_patch_for_type
from .results import results


def refuse_arguments(
    args: PackedSFTConfig, *, compute_metrics: Callable[..., Any] | None, peft_config: PeftConfig | None
) -> None:
    """Arguments of the trainer that contradict packing.

    Raises:
        [`InvalidConfig`]: naming them.
        [`NoBackend`]: if the named attention backend cannot run on this machine.
        [`VersionTooOld`]: for a DeepSpeed whose ZeRO-3 cannot be proven.
    """
    targets = getattr(peft_config, "target_modules", None) or ()
    if "lm_head" in ([targets] if isinstance(targets, str) else targets):
        raise InvalidConfig(
            "peft_config targets 'lm_head'.",
            why=["TRL multiplies hidden states with lm_head.weight directly: its adapter would never be trained"],
            do="Remove 'lm_head' from target_modules; to train it in full, name it in modules_to_save.",
        )
    if not args.packing:
        return
    if compute_metrics is not None and args.eval_packing:
        raise InvalidConfig(
            "compute_metrics with eval_packing=True: metrics are computed example by example.",
            why=["a packed batch has one row of logits for many examples"],
            do="Leave eval_packing unset; evaluation is then padded, training stays packed.",
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            "accelerator_config.dispatch_batches=True cannot carry document boundaries.",
            why=["accelerate would concatenate and cut the packed batches of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_adapter(peft_config)
    _refuse_backend(args)
    refuse_parallelism(asked_parallelism(args))
    if getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        refuse_zero3(args)


def _refuse_backend(args: PackedSFTConfig) -> None:
    """A named backend that could not serve even the plainest of models here; what it cannot do for this one is known
    once that has been built."""
    if args.attention_backend == "auto":
        return
    plainest = AttentionRequest(args.device, torch.bfloat16, head_dim=64, num_heads=8, num_key_value_heads=8)
    reasons = get_backend(args.attention_backend).refusals(plainest)
    if reasons:
        raise NoBackend(
            f"attention backend '{args.attention_backend}' cannot run here.",
            why=reasons,
            do="Pass attention_backend='auto', or see `trl-packfa backends`.",
        )


def refuse_model(model: str | PreTrainedModel | PeftModel, args: PackedSFTConfig) -> None:
    """A model, or a model type, that no patch serves or that cannot take the arguments. What nobody has measured is
    for [`patch`] to check.

    Raises:
        [`UnsupportedModel`]: with the nearest names; for an adapter or a quantization that mixes documents.
        [`InvalidConfig`]: if quantization is asked of a model that is loaded already.
    """
    name = model if isinstance(model, str) else model_type(model)
    if name in results() and results()[name]["verdict"] != "exact":
        get_patch_for_type(name)  # raises, with the reason
    if isinstance(model, str):
        return
    native = getattr(model_config(model), "distributed_config", None)
    refuse_parallelism({name: getattr(native, name, None) or 1 for name in ("tp_size", "ep_size", "pp_size")})
    if getattr(model, "hf_device_map", None) and any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidConfig(
            "device_map has offloaded weights of the model, to a disk or from an accelerator to the CPU.",
            why=["they are gone when the backward pass needs them: torch cannot train through them"],
            do="Load the model without device_map, perhaps with load_in_4bit=True, or shard it: fsdp=True.",
        )
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if (args.load_in_4bit or args.load_in_8bit) and not quantized:
        raise InvalidConfig(
            "load_in_4bit or load_in_8bit is set, but the model is loaded already, unquantized.",
            do="Pass the model by name, or load it with a BitsAndBytesConfig and drop the argument.",
        )
    refuse_adapters(model)
    refuse_quantization(quantization_config_of(model))


def refuse_collator(collator: Callable[[list[Any]], dict[str, Any]] | None) -> None:
    """A data collator whose batches do not say where documents begin: tried on two small documents.

    Raises:
        [`InvalidConfig`]: if it fails on them or loses the boundary.
    """
    if collator is None:
        return
    why = "it returns no position_ids that restart and no cu_seq_lens_q"
    try:
        batch = collator([{"input_ids": ids, "labels": list(ids)} for ids in ([1, 2, 3], [4, 5])])
        layout = layout_of(batch)
        if layout is not None and layout.lengths[:2] == (3, 2):
            return
    except (PackingError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        why = f"it failed on two tokenized documents: {error!r}"
    raise InvalidConfig(
        f"data_collator {type(collator).__name__} does not carry document boundaries.",
        why=[why],
        do="Leave data_collator unset, use trl_packfa.DataCollatorForPacking, or train padded with packing=False.",
    )


def refuse_sources(args: PackedSFTConfig, train_dataset: Dataset | IterableDataset | None) -> None:
    """A column of sources that is not there.

    Raises:
        [`InvalidConfig`]: naming the columns that are.
    """
    if args.loss_by is None or train_dataset is None:
        return
    columns = train_dataset.column_names or list(next(iter(train_dataset), {}))
    if args.loss_by not in columns:
        raise InvalidConfig(
            f"loss_by='{args.loss_by}': the training dataset has no such column.",
            why=[f"columns: {', '.join(columns)}"],
            do="Name one of them.",
        )
