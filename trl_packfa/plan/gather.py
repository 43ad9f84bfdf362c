"""Lengths and labels of every document, from the trainer's own tokenization or from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..config.sft import PackedSFTConfig
from ..data.dataset import Tokens, cut_dataset, read_lengths, read_tokens
from ..data.image_rows import NamingCollator, NumberedRows, image_columns, look_at_images
from ..data.templates import load_tokenizer
from ..data.turns import CONVERSATION, join
from ..errors import InvalidDataset
from ..packing import TrainedTokens
from ..scripts.tokenizing import Tokenized, tokenized, tokenizing_trainer

# The most rows of images that are processed: a processor takes some milliseconds for each.
_PROCESSED = 256
# The longest document that rows, whose offsets are int32 in the attention kernels, can hold.
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Source:
    """Documents before anything is cut."""

    name: str  # of the dataset or file
    tokens: Tokens
    remarks: tuple[str, ...] = ()  # facts about the data that the user should know
    on_images: bool = False  # whether rows have images; then the lengths of some rows stand for all


def lengths_from_file(path: str) -> Source:
    """Read document lengths from a JSON list as [`read_length_list`] does; every token counts as trained."""
    lengths = read_length_list(path)
    return Source(Path(path).name, Tokens(lengths, TrainedTokens.every(int(lengths.sum()))))


def read_length_list(path: str) -> np.ndarray:
    """Read document lengths in tokens, int64; raise [`InvalidDataset`] if the file is no JSON list of such numbers."""
    try:
        numbers = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidDataset(
            f"cannot read lengths from {path}.", why=[str(error)], do="Pass a JSON file with a list of token counts."
        ) from error
    lengths = np.array(numbers) if isinstance(numbers, list) and numbers else np.zeros(1)
    if lengths.ndim != 1 or lengths.dtype.kind != "i" or lengths.min() < 1:
        raise InvalidDataset(
            f"{path} is not a list of document lengths.",
            why=["expected: a JSON list of whole numbers of tokens, each 1 or more, such as [163, 485, 71]"],
            do="Write one number of tokens for each document.",
        )
    if lengths.max() > _LONGEST:
        raise InvalidDataset(
            f"{path} has a document of {lengths.max():,} tokens.",
            why=[f"no row can hold more than {_LONGEST:,}"],
            do="Write lengths in tokens, not the size of a file or dataset.",
        )
    return lengths.astype(np.int64)


def read_documents(name: str, dataset: Any, tokenizer: str, args: PackedSFTConfig) -> Source:
    """Tokenize and label a dataset with the named tokenizer, as [`PackedSFTTrainer`] does.

    Raise [`InvalidDataset`] if the dataset is a stream, already packed, in no TRL format, or refused by TRL,
    [`InvalidConfig`] if there is no such tokenizer, or its template does not mark the tokens to train.
    """
    if "seq_lengths" in (dataset.column_names or ()):
        raise InvalidDataset(
            f"the dataset '{name}' has a column 'seq_lengths': its rows were packed before.",
            do="Plan with the documents that the rows were packed from.",
        )
    loaded = load_tokenizer(tokenizer, args, otherwise="pass --tokenizer, or the documents' lengths with --lengths")
    if image_columns(dataset):
        return _read_images(name, dataset, loaded, args)
    prepared = tokenized(dataset, loaded, args)
    if args.expand_turns:
        return _rows_of_turns(name, prepared, args)
    return Source(name, read_tokens(prepared.dataset), tuple(prepared.remarks))


def _rows_of_turns(name: str, prepared: Tokenized, args: PackedSFTConfig) -> Source:
    """Return the rows of the conversations' turns, by the tokens that are computed."""
    examples, report = cut_dataset(
        prepared.dataset, max_length=args.max_length, overflow=args.overflow, name=name, as_padded=True
    )
    rows, report = join(examples, report, limit=args.max_length, name=name)
    lengths = read_lengths(rows).astype(np.int64)
    # Where a row's trained tokens stand does not matter, as rows are not cut.
    counts = [sum(label != -100 for label in labels) for labels in rows["labels"]]
    trained = [min(count, int(length)) for count, length in zip(counts, lengths, strict=True)]
    masks = [np.arange(length) >= length - count for count, length in zip(trained, lengths, strict=True)]
    whole = report.packed_tokens / max(report.packed_tokens - report.shared_tokens, 1)
    told = (
        f"{len(set(prepared.dataset[CONVERSATION])):,} conversations are {report.documents:,} turns; their histories "
        f"run once, so {lengths.sum():,} of {report.packed_tokens:,} tokens are computed ({whole:.1f} times fewer)"
    )
    return Source(name, Tokens(lengths, TrainedTokens.from_masks(masks)), (*prepared.remarks, told))


def _read_images(name: str, dataset: Dataset, processor: Any, args: PackedSFTConfig) -> Source:
    """Process some rows as the trainer's loader would, and let their lengths stand for all."""
    trainer = tokenizing_trainer(dataset, processor, args)
    look_at_images(dataset, name="train")
    numbered, collate = NumberedRows(dataset, "train"), NamingCollator(trainer.data_collator)
    chosen = np.linspace(0, len(dataset) - 1, min(_PROCESSED, len(dataset))).astype(int).tolist()
    lengths, of_images, image = [], 0, getattr(processor, "image_token_id", None)  # no two processors are alike
    for number in chosen:
        batch = collate([numbered[number]])
        lengths.append(int(batch["attention_mask"].sum()))
        of_images += int((batch["input_ids"] == image).sum()) if image is not None else 0
    sizes = np.array(lengths, dtype=np.int64)
    remark = (
        f"Images: {len(chosen):,} of {len(dataset):,} rows were processed, and their lengths stand for all. "
        f"{of_images / sizes.sum():.0%} of their tokens are of images. Patches are not counted here; training counts "
        "them, so it may run more micro-batches a step."
    )
    longer = int((sizes > args.max_length).sum()) if args.max_length is not None else 0
    cut = f"{longer:,} of the processed rows are longer than max_length={args.max_length}: a cut through an image is "
    remarks = [remark, *([f"{cut}refused. Set max_length=None."] if longer else [])]
    every = np.resize(sizes, len(dataset))
    return Source(name, Tokens(every, TrainedTokens.every(int(every.sum()))), tuple(remarks), on_images=True)
