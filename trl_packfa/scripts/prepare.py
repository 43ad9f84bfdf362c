"""The script of `trl-packfa prepare`: tokenize, label, cut and count the data of a run once, into a folder."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset
from rich.console import Console
from trl import DatasetMixtureConfig, ScriptArguments

from ..config.sft import PackedSFTConfig
from ..data.dataloading import PackedData
from ..data.image_rows import image_columns
from ..data.prepared import marked, save, settings_of
from ..data.templates import load_tokenizer
from ..errors import InvalidConfig, InvalidDataset
from ..override import set_inside
from ..packing import PackingReport
from ..terminal.progress import packing_table
from .parsing import ColumnChoice, parse
from .tokenizing import Tokenized, tokenized
from .train import load_splits


def prepare(argv: list[str]) -> int:
    """Parse the flags of `trl-packfa train`, prepare the splits, and save them to `output_dir`. Return 0."""
    # Data is prepared on machines without a GPU, so arguments that require one are turned off here.
    classes = (ScriptArguments, PackedSFTConfig, DatasetMixtureConfig, ColumnChoice)
    given = ["--use_cpu", "true", *argv, "--tf32", "false"]
    script, args, mixture, chosen = parse(classes, given, prog="trl-packfa prepare")
    folder = Path(args.output_dir)
    if folder.exists() and any(folder.iterdir()):
        raise InvalidConfig(f"output_dir {folder} is not empty.", do="Name a new folder for the prepared data.")
    if args.model_name_or_path is None:
        raise InvalidConfig("no tokenizer is named.", do="Pass --model_name_or_path; its tokenizer is enough.")
    if not args.packing:
        raise InvalidConfig("packing=False: TRL prepares padded data itself.", do="Drop packing=False.")
    tokenizer = load_tokenizer(args.model_name_or_path, args)
    names = ("train", "eval")
    splits, reports = {}, {}
    for name, dataset in zip(names, load_splits(script, args, mixture, chosen.columns), strict=False):
        split = script.dataset_train_split if name == "train" else script.dataset_test_split
        splits[split], reports[name] = _prepared(dataset, tokenizer, args, name=name)
    save(splits, folder)
    Console().print(packing_table(reports))
    print(f"prepared: {folder}. To train: trl-packfa train --dataset_name {folder}, with the same arguments")
    return 0


def _prepared(
    dataset: Dataset, tokenizer: object, args: PackedSFTConfig, *, name: str
) -> tuple[Dataset, PackingReport]:
    """Return a split as [`PackedSFTTrainer`] would cut it, marked, and its report."""
    if image_columns(dataset):
        raise InvalidDataset(
            "images are processed when they are loaded, and cannot be prepared.", do="Train on the dataset itself."
        )
    found: list[Tokenized] = []

    def tokenize(uncut: PackedSFTConfig) -> Dataset:
        found.append(tokenized(dataset, tokenizer, uncut, name=name))
        return found[0].dataset

    data = PackedData(args, packs_eval=lambda: args.eval_packing is not False)
    with set_inside(args, shuffle_dataset=False):  # each run shuffles as it is told
        cut = data.prepare(tokenize, name=name)
    settings = settings_of(args, tokenizer, found[0].chat_template, name=name)
    return marked(cut, data.reports[name], settings), data.reports[name]  # type: ignore[arg-type]  # it is no stream
