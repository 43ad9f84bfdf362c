"""What `PackedSFTTrainer` refuses before any data is touched, and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import ParallelismConfig
from datasets import Dataset, IterableDataset
from packaging.version import Version
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from .boundaries import layout_of
from .config import PackedSFTConfig
from .errors import InvalidConfig, PackingError, UnsupportedModel, VersionTooOld
from .finding import model_config, model_type
from .patching import find_state
from .registry import get_patch_for_type
from .results import results
from .versions import installed_version


def refuse_arguments(
    args: PackedSFTConfig, *, compute_metrics: Callable[..., Any] | None, peft_config: PeftConfig | None
) -> None:
    """Arguments of the trainer that contradict packing.

    Raises:
        [`InvalidConfig`]: naming them.
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
    if getattr(peft_config, "is_prompt_learning", False):
        _refuse_prompt_learning(peft_config)
    refuse_parallelism(asked_parallelism(args))
    if getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        _refuse_zero3(args)


# The first DeepSpeed whose engine was seen to leave gradients alone while the exactness check takes them.
_DEEPSPEED = "0.19.8"


def _refuse_zero3(args: PackedSFTConfig) -> None:
    config: Any = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    if args.fp16 or config.get("fp16", {}).get("enabled") is True:
        raise InvalidConfig(
            "fp16 under DeepSpeed ZeRO-3 cannot be packed.",
            why=[
                "DeepSpeed runs no backward without its loss scaling there, and the exactness check measures gradients"
            ],
            do="Use bf16=True, or FSDP2 (fsdp=True).",
        )
    found = installed_version("deepspeed")
    if Version(found or "0") < Version(_DEEPSPEED):
        raise VersionTooOld(
            f"deepspeed {found or 'is not installed'}, needed >= {_DEEPSPEED} for ZeRO-3.",
            why=["the exactness check needs an engine that can leave gradients alone (coalesce_grad_reduction)"],
            do=f"pip install 'deepspeed>={_DEEPSPEED}', or use FSDP2 (fsdp=True).",
        )


def refuse_uneven_calls(model: nn.Module, *, sharding: str) -> None:
    """A patched model of which some modules run document by document, where weights are gathered when they run.

    Ranks gather together. Those whose rows hold other documents would run such a module another number of times, and
    gather parts of different weights into one. ZeRO-3 gathers for every module, FSDP2 for whole layers, within which
    a module may run as often as it likes.

    Args:
        model (`torch.nn.Module`): a patched model.
        sharding (`str`): `"DeepSpeed ZeRO-3"` or `"FSDP2"`.

    Raises:
        [`InvalidConfig`]: naming the modules.
    """
    state = find_state(model)
    if state is None:
        return
    uneven = sorted(state.mixers) if sharding != "FSDP2" else []
    uneven = ["the backbone"] if state.patch.rebatch else uneven
    if uneven:
        named = ", ".join([*uneven[:3], *(["..."] if len(uneven) > 3 else [])])
        raise InvalidConfig(
            f"{sharding} cannot run {named} document by document.",
            why=["it gathers weights each time they are used, which would be another number of times on each rank"],
            do="Use DDP or ZeRO-2.",
        )


# Ways to divide a model or a row over ranks, by the name of the size that switches them on.
_DIVIDED = {
    "tp_size": "tensor parallelism: ranks that share a layer need the same rows; packed rows are dealt to all ranks",
    "ep_size": "expert parallelism: ranks that share a layer need rows that pass it together",
    "pp_size": "pipeline parallelism: stages hand each other hidden states, without the boundaries of their documents",
    "cp_size": "context parallelism: a row is cut anywhere, and attention across the cut knows no document boundaries",
    "sp_size": "sequence parallelism: ranks exchange heads for tokens inside the attention that packing replaces",
}


def asked_parallelism(args: PackedSFTConfig) -> dict[str, int]:
    """The sizes that arguments, accelerate's environment or DeepSpeed's config ask for."""
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    sizes = {name: getattr(config, name, None) or 1 for name in _DIVIDED}
    kwargs = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    native = kwargs.get("distributed_config")
    of_native: Any = native.get if isinstance(native, dict) else partial(getattr, native)
    deepspeed: Any = getattr(args.deepspeed_plugin, "deepspeed_config", None) or {}
    sizes["tp_size"] = max(sizes["tp_size"], deepspeed.get("tensor_parallel", {}).get("autotp_size") or 1)
    for name in ("tp_size", "ep_size", "pp_size"):
        sizes[name] = max(sizes[name], kwargs.get(name) or 1, of_native(name, None) or 1)
    if kwargs.get("tp_plan") or of_native("tp_plan", None):
        sizes["tp_size"] = max(sizes["tp_size"], args.world_size)
    return sizes


def refuse_parallelism(sizes: dict[str, int]) -> None:
    """A model or a row that is divided over ranks.

    Args:
        sizes (`dict[str, int]`):
            Of the groups of ranks: `tp_size`, `ep_size`, `pp_size`, `cp_size`, `sp_size`.

    Raises:
        [`InvalidConfig`]: naming those above 1, each with the reason.
    """
    found = {name: size for name, size in sizes.items() if size > 1}
    if found:
        raise InvalidConfig(
            f"{', '.join(f'{name}={size}' for name, size in found.items())} cannot be packed.",
            why=[_DIVIDED[name] for name in found],
            do="Shard the model with FSDP2 (fsdp=True), under which every rank has rows of its own, or packing=False.",
        )


def refuse_model(model: str | PreTrainedModel | PeftModel, args: PackedSFTConfig) -> None:
    """A model, or a model type, that no patch serves or that cannot take the arguments. What nobody has measured is
    for [`patch`] to check.

    Raises:
        [`UnsupportedModel`]: with the nearest names.
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
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        _refuse_prompt_learning(model.active_peft_config)


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


def _refuse_prompt_learning(peft_config: Any) -> None:
    raise UnsupportedModel(
        f"{type(peft_config).__name__} cannot be packed.",
        why=["virtual tokens are put before the row, not before each document"],
        do="Use LoRA or another adapter that changes weights, or packing=False.",
    )
