"""What trainers without pads refuse, a packed one before data is tokenized and weights are read, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from ..errors import InvalidConfig, InvalidDataset
from ..training.model_loading import model_type, named
from ..training.parallelism import asked_parallelism, refuse_parallelism
from ..training.preflight import require_attention, require_reporters, require_tokenizer
from ..training.validation import refuse_adapters_and_backend, refuse_data, refuse_model, refuse_untrainable


def refuse_liger(args: Any, name: str) -> None:
    """Liger kernels and losses, which compute every place of a padded batch.

    Args:
        args (`TrainingArguments`):
            Of a trainer of TRL's.
        name (`str`):
            What to call it.

    Raises:
        [`InvalidConfig`]: naming the argument.
    """
    liger = [field for field in ("use_liger_kernel", "use_liger_loss") if getattr(args, field, False)]
    if liger:
        raise InvalidConfig(
            f"{name} with {liger[0]}=True cannot run without its pads.",
            why=["Liger puts forwards of its own in the place of the model's, which was not measured without pads"],
            do=f"Set {liger[0]}=False; TRL deprecates it, and the fused LM head is TRL's own.",
        )


def require_columns(dataset: Dataset, *, name: str, trainer: str, formats: Sequence[Sequence[str]]) -> None:
    """Require the columns of one of the formats that TRL's trainer takes, unless the dataset is tokenized.

    Args:
        dataset (`Dataset`):
            As the user passed it.
        name (`str`):
            What to call it.
        trainer (`str`):
            What to call the trainer.
        formats (`Sequence[Sequence[str]]`):
            The columns of each.

    Raises:
        [`InvalidDataset`]: naming the columns that are there, and those that are wanted.
    """
    there = dataset.column_names
    if any(column.endswith("_ids") for column in there) or any(set(columns) <= set(there) for columns in formats):
        return
    wanted = ", or ".join(" and ".join(repr(column) for column in columns) for columns in formats)
    if "completion" in there:
        other = "SFT trains on 'prompt' and 'completion': PackedSFTTrainer, or --trainer sft."
    else:
        other = "Rename the columns, or make them: --columns 'NAME=TEMPLATE' on the command line."
    raise InvalidDataset(
        f"the {name} dataset has columns {sorted(there)}, of which {trainer} cannot train.",
        why=[f"wanted: {wanted}"],
        do=other,
    )


def refuse_before_loading(trainer: str, given: dict[str, Any], args: Any, *, columns: Sequence[Sequence[str]]) -> None:
    """Arguments, data and a model that cannot run without pads.

    Args:
        trainer (`str`):
            What to call the trainer.
        given (`dict[str, Any]`):
            Its arguments, by name.
        args ([`PreferenceConfig`]):
            As they are settled.
        columns (`Sequence[Sequence[str]]`):
            The columns of each format that the trainer takes.

    Raises:
        [`InvalidConfig`]: naming the argument.
        [`InvalidDataset`]: for a stream, images, or no data at all.
        [`UnsupportedModel`]: for a model, an adapter or a quantization that mixes documents.
    """
    model, adapter, train = given["model"], given.get("peft_config"), given.get("train_dataset")
    refuse_untrainable(model, adapter)
    if not isinstance(train, Dataset):
        raise InvalidDataset(
            f"{trainer} takes a `Dataset`, train_dataset is {type(train).__name__}.",
            why=["what is cut or dropped is counted before the first step, and steps are planned over all ranks"],
            do="Load it whole; a stream trains without pads by trl_packfa.padding_free and TRL's own trainer.",
        )
    if not len(train):
        raise InvalidDataset("the train dataset is empty.", do="Check the split, filters and file names.")
    for name, dataset in named(train, given.get("eval_dataset")):
        refuse_data(dataset, name=name)
        if isinstance(dataset, Dataset):
            require_columns(dataset, name=name, trainer=trainer, formats=columns)
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            "accelerator_config.dispatch_batches=True cannot carry the pairs of a step.",
            why=["accelerate would concatenate and cut the batches of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_adapters_and_backend(args, adapter)
    refuse_parallelism(asked_parallelism(args))
    refuse_model(model_type(model, args) if isinstance(model, str) else model, args)
    require_reporters(args)
    require_attention(args)
    require_tokenizer(
        model, args, processing_class=given.get("processing_class"), datasets=named(train, given.get("eval_dataset"))
    )
