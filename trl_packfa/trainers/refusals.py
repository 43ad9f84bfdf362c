"""What trainers without pads refuse, a packed one before data is tokenized and weights are read, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InvalidConfig, InvalidDataset
from ..training.model_loading import model_type, named
from ..training.parallelism import asked_parallelism, refuse_parallelism
from ..training.preflight import require_attention, require_reporters, require_tokenizer
from ..training.validation import refuse_adapters_and_backend, refuse_data, refuse_model


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


def refuse_before_loading(trainer: str, given: dict[str, Any], args: Any) -> None:
    """Arguments, data and a model that cannot run without pads.

    Args:
        trainer (`str`):
            What to call the trainer.
        given (`dict[str, Any]`):
            Its arguments, by name.
        args ([`PreferenceConfig`]):
            As they are settled.

    Raises:
        [`InvalidConfig`]: naming the argument.
        [`InvalidDataset`]: for images, or no data at all.
        [`UnsupportedModel`]: for a model, an adapter or a quantization that mixes documents.
    """
    model, adapter, train = given["model"], given.get("peft_config"), given.get("train_dataset")
    if isinstance(train, Dataset) and not len(train):
        raise InvalidDataset("the train dataset is empty.", do="Check the split, filters and file names.")
    if not isinstance(train, (Dataset, IterableDataset)):
        raise InvalidDataset(
            f"{trainer} takes a `Dataset` or a stream, train_dataset is {type(train).__name__}.",
            do="Load it with datasets.load_dataset, or make one: Dataset.from_list(rows).",
        )
    if isinstance(train, IterableDataset):
        _refuse_policy(args)
    for name, dataset in named(train, given.get("eval_dataset")):
        refuse_data(dataset, name=name)
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            "accelerator_config.dispatch_batches=True cannot carry the pairs of a step.",
            why=["accelerate would concatenate and cut the batches of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_adapters_and_backend(args, adapter)
    refuse_parallelism(asked_parallelism(args))
    refuse_model(model_type(model, args) if isinstance(model, str) else model, args)


def require_run(given: dict[str, Any], args: Any) -> None:
    """Require what a run needs besides model and data, packed or not: reporters, the attention, a tokenizer.

    Raises:
        [`MissingPackage`]: naming the package.
        [`InvalidConfig`], [`InvalidDataset`]: naming what the tokenizer lacks.
    """
    require_reporters(args)
    require_attention(args)
    datasets = named(given.get("train_dataset"), given.get("eval_dataset"))
    require_tokenizer(given["model"], args, processing_class=given.get("processing_class"), datasets=datasets)


def _refuse_policy(args: Any) -> None:
    """A stream's pairs that are too long by another policy than TRL's: they are cut, or left out, by TRL."""
    default = next(f.default for f in fields(args) if f.name == "overflow")
    if args.overflow != default:
        raise InvalidConfig(
            f"overflow='{args.overflow}' with a stream.",
            why=["its pairs are not known before they come: TRL cuts them, or leaves them out"],
            do=f"Drop overflow ('{default}'), or load the dataset whole.",
        )
