"""Checks that refuse arguments, data and models which cannot train without padding, with the reasons.

For a packed trainer they run before data is tokenized and weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from datasets import Dataset, IterableDataset

from ...errors import InvalidConfig, InvalidDataset
from ..common.image_rows import image_columns
from ..common.model_loading import model_type, named
from ..common.parallelism import asked_parallelism, refuse_parallelism
from ..common.validation import refuse_adapters_and_backend, refuse_data, refuse_model


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
    """Require the columns of one of the formats that TRL's trainer takes, unless the dataset is tokenized.

    `formats` are the columns of each format; `name` and `trainer` name the dataset and the trainer in messages.
    """
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


def refuse_before_loading(trainer: str, given: dict[str, Any], args: Any, *, takes_images: bool) -> None:
    """Refuse arguments, data and models that cannot train without padding, before data and weights are loaded.

    `given` are the trainer's arguments by name, `args` is the settled config. `takes_images`: TRL's trainer takes
    images.
    """
    model, adapter, train = given["model"], given.get("peft_config"), given.get("train_dataset")
    if isinstance(train, Dataset) and not len(train):
        raise InvalidDataset("the train dataset is empty.", do="Check the split, filters and file names.")
    if not isinstance(train, (Dataset, IterableDataset)):
        raise InvalidDataset(
            f"{trainer} takes a `Dataset` or a stream, but train_dataset is {type(train).__name__}.",
            do="Load it with datasets.load_dataset, or make one: Dataset.from_list(rows).",
        )
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
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise InvalidConfig(
            "accelerator_config.dispatch_batches=True cannot carry the pairs of a step.",
            why=["accelerate would concatenate and cut the batches of several ranks"],
            do="Leave dispatch_batches unset.",
        )
    refuse_adapters_and_backend(args, adapter)
    refuse_parallelism(asked_parallelism(args))
    refuse_model(model_type(model, args) if isinstance(model, str) else model, args)


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
