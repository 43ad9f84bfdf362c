"""Checks that refuse invalid arguments, models and datasets before any data is processed, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel
from transformers.training_args import OptimizerNames

from ...adapters import refuse_adapter, refuse_adapters, refuse_quantized
from ...attention import AttentionRequest, get_backend
from ...errors import InvalidConfig, InvalidDataset, NoBackend
from ...patches.measured import results
from ...patches.registry import get_patch_for_type
from ...patching import inspect
from ...patching.apply import find_state
from .config import CommonConfig, refuse_adapted_head
from .image_rows import image_columns
from .model_loading import model_type, named
from .parallelism import asked_parallelism, refuse_parallelism

logger = get_logger(__name__)


def refuse_untrainable(model: Any, peft_config: PeftConfig | None) -> None:
    """Refuse models and adapters that cannot be trained at all, packed or not."""
    refuse_adapted_head(
        getattr(peft_config, "target_modules", None),
        "peft_config targets 'lm_head'.",
        do="Remove 'lm_head' from target_modules. To train it in full, name it in modules_to_save.",
    )
    if getattr(model, "hf_device_map", None) and any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidConfig(
            "device_map has offloaded weights of the model, to a disk or from an accelerator to the CPU.",
            why=["torch cannot train through them: they are gone when the backward pass needs them"],
            do="Load the model without device_map, for example with load_in_4bit=True, or shard it: fsdp=True.",
        )


def refuse_setup(
    args: CommonConfig,
    model: str | PreTrainedModel | PeftModel,
    peft_config: PeftConfig | None,
    *,
    carries: str,
    batches: str = "batches",
) -> None:
    """Refuse a loader, adapter, backend, way of parallel training or model that cannot run without padding.

    `carries` says what accelerate's loader would have to carry from one process to the others, with its `batches`.
    """
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            f"accelerator_config.dispatch_batches=True cannot carry {carries}.",
            why=[f"accelerate would concatenate and cut the {batches} of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_adapter(peft_config)
    _refuse_backend(args)
    refuse_parallelism(asked_parallelism(args))
    refuse_model(model_type(model, args) if isinstance(model, str) else model, args)


def _refuse_backend(args: CommonConfig) -> None:
    """Refuse a named attention backend that cannot run here."""
    if args.attention_backend == "auto":
        return
    # Whether it can serve the run's model is known only once the model is built. Head dim 64, as many keys as queries,
    # no window, no softcap: every backend that runs here at all can do this.
    plainest = AttentionRequest(args.device, torch.bfloat16, 64, 8, 8, named=True)
    reasons = get_backend(args.attention_backend).refusals(plainest)
    if reasons:
        raise NoBackend(
            f"attention backend '{args.attention_backend}' cannot run here.",
            why=reasons,
            do="Pass attention_backend='auto', or see `trl-packfa backends`.",
        )


def refuse_model(model: str | PreTrainedModel | PeftModel, args: CommonConfig) -> None:
    """Refuse a model or type that no patch supports, or that contradicts the arguments. [`patch`] checks new types."""
    name = model if isinstance(model, str) else inspect.model_type(model)
    if name in results() and results()[name]["verdict"] != "exact":
        get_patch_for_type(name)  # raises with the reason
    if isinstance(model, str):
        return
    native = getattr(inspect.model_config(model), "distributed_config", None)
    refuse_parallelism({name: getattr(native, name, None) or 1 for name in ("tp_size", "ep_size", "pp_size")})
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if (args.load_in_4bit or args.load_in_8bit) and not quantized:
        raise InvalidConfig(
            "load_in_4bit or load_in_8bit is set, but the model is already loaded, without quantization.",
            do="Pass the model by name, or load it with a BitsAndBytesConfig and drop the argument.",
        )
    refuse_adapters(model)
    refuse_quantized(model)


# Optimizers that keep their state in the weights' dtype.
_STATE_LIKE_WEIGHTS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


def refuse_precision(model: torch.nn.Module, args: CommonConfig, *, scales_losses: bool, own_optimizer: bool) -> None:
    """Refuse trained float16 weights where training them fails; warn if `fp16` has no effect."""
    if args.fp16 and args.device.type == "cpu":
        logger.warning("trl-packfa: fp16=True has no effect on a CPU: accelerate computes in the weights' own dtype.")
    halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
    why = []
    if scales_losses:
        why += ["fp16=True scales the loss, and torch removes the scale from float32 gradients only"]
    # float16's smallest number is 6e-8, the square of 2.4e-4. Below it AdamW would divide by 0 plus epsilon.
    if args.optim in _STATE_LIKE_WEIGHTS and not own_optimizer:
        why += [
            f"optim='{OptimizerNames(args.optim).value}' keeps its state in float16, where the square of a gradient "
            "below 2e-4 is 0: steps become too large, or NaN"
        ]
    if halves and why:
        raise InvalidConfig(
            f"{len(halves)} trained weights are in float16: {halves[0]}, ...",
            why=why,
            do="Load the model with dtype='float32' or 'bfloat16', or train an adapter, which PEFT keeps in float32.",
        )


def refuse_data(dataset: Dataset | IterableDataset, *, name: str) -> None:
    """Refuse a dataset that is transformed on the fly."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise InvalidDataset(
            f"the {name} dataset is transformed on the fly (set_transform or with_transform).",
            why=["packing plans with lengths before training, and a resumed run must see the same documents"],
            do="Use dataset.map(...), which is computed once, or reset_format().",
        )


def runs_by_document(model: Any) -> bool:
    """Tell whether the backbone of a patched model runs document by document."""
    state = find_state(model)
    return state is not None and state.patch.rebatch


def refuse_liger(args: Any, name: str) -> None:
    """Refuse Liger kernels and losses, which compute every position of a padded batch. `name` is the trainer's."""
    liger = [field for field in ("use_liger_kernel", "use_liger_loss") if getattr(args, field, False)]
    if liger:
        raise InvalidConfig(
            f"{name} with {liger[0]}=True cannot run without its pads.",
            why=["Liger replaces the model's forwards by its own, which were not measured without pads"],
            do=f"Set {liger[0]}=False. TRL deprecates it and has a fused LM head of its own.",
        )


def require_columns(dataset: Dataset, *, name: str, trainer: str, formats: Sequence[Sequence[str]]) -> None:
    """Require the columns of one of the formats that TRL's trainer takes, unless the dataset is tokenized."""
    there = dataset.column_names
    if any(column.endswith("_ids") for column in there) or any(set(columns) <= set(there) for columns in formats):
        return
    wanted = ", or ".join(" and ".join(repr(column) for column in columns) for columns in formats)
    if "completion" in there:
        other = "For 'prompt' and 'completion' use SFT: PackedSFTTrainer, or --trainer sft."
    else:
        other = "Rename the columns, or make them: --columns 'NAME=TEMPLATE' on the command line."
    raise InvalidDataset(
        f"the {name} dataset has columns {sorted(there)}; {trainer} cannot train on them.",
        why=[f"wanted: {wanted}"],
        do=other,
    )


def require_dataset(given: Any, *, name: str) -> None:
    """Refuse what is no `Dataset` and no stream."""
    if not isinstance(given, Dataset | IterableDataset):
        what = f"{name}_dataset must be a `Dataset` or `IterableDataset`, not {type(given).__name__}."
        raise InvalidDataset(what, do=_how_to_load(given))


def _how_to_load(given: Any) -> str:
    if isinstance(given, dict):
        return "Name one of its splits."
    if isinstance(given, str | Path):
        return f'Load it: datasets.load_dataset("json", data_files="{given}", split="train"), or by its Hub name.'
    return "Make one: datasets.Dataset.from_list(rows), with a dictionary for each example."


def refuse_before_loading(trainer: str, given: dict[str, Any], args: Any, *, takes_images: bool) -> None:
    """Refuse arguments, data and models that cannot train without padding, before data and weights are loaded."""
    train = given.get("train_dataset")
    if isinstance(train, Dataset) and not len(train):
        raise InvalidDataset("the train dataset is empty.", do="Check the split, filters and file names.")
    require_dataset(train, name="train")
    if isinstance(train, IterableDataset):
        _refuse_policy(args, "a stream", "its pairs are not known before they are read, so TRL cuts or drops them")
    for name, dataset in named(train, given.get("eval_dataset")):
        refuse_data(dataset, name=name)
        if columns := image_columns(dataset):
            if not takes_images:
                raise InvalidDataset(
                    f"the {name} dataset has a column '{columns[0]}', and {trainer} takes no images.",
                    why=["TRL's own trainer takes none: it would tokenize the text alone"],
                    do="Drop the column to train on the text alone. PackedDPOTrainer and PackedKTOTrainer take "
                    "images.",
                )
            _refuse_policy(args, "images", "their tokens exist only after collation, where TRL cuts them")
    refuse_setup(args, given["model"], given.get("peft_config"), carries="the pairs of a step")


def _refuse_policy(args: Any, what: str, why: str) -> None:
    """Refuse an overflow policy other than TRL's where TRL itself cuts or drops long pairs."""
    default = next((f.default for f in fields(args) if f.name == "overflow"), None)
    if default is not None and args.overflow != default:
        raise InvalidConfig(
            f"overflow='{args.overflow}' with {what}.",
            why=[why],
            do=f"Drop overflow (the default is '{default}'), or load the whole dataset."
            if what == "a stream"
            else f"Drop overflow (the default is '{default}').",
        )
