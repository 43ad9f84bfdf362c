"""Documents of a benchmark, tokenized and cut once, so that every side has the same documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer
from trl import get_dataset

from ..data.dataset import count_trained, cut_dataset, read_lengths
from ..data.files import load_dataset_dict
from ..errors import InvalidConfig, InvalidDataset
from ..plan.gather import read_length_list
from ..scripts.tokenizing import tokenized
from .arguments import Setup

# Lengths of random documents, or the splits of a dataset.
Documents = list[int] | dict[str, Dataset]

# Smaller token ids are special in the placeholder tokenizer.
_FIRST_WORD = 4
Draw = Callable[[np.random.Generator, int], np.ndarray]


def _log_normal(median: float, spread: float) -> Draw:
    return lambda rng, count: np.exp(rng.normal(np.log(median), spread, count)).astype(int) + 1


# Functions by name that draw `count` lengths in tokens.
MIXES: dict[str, Draw] = {
    "short": lambda rng, count: np.full(count, 128),
    "even": _log_normal(150, 0.35),  # like arithmetic problems: mean 160, 1 % above 340
    "uneven": _log_normal(170, 1.0),  # like FLAN: mean 280, 1 % above 1,700
    "long": lambda rng, count: np.full(count, 4096),
    "whole": lambda rng, count: np.full(count, 2**30),  # one document fills the whole row
}
_DRAWN = 20_000


def every_length(mix: str, *, seed: int) -> list[int]:
    """Return the document lengths of a dataset: all of a JSON file, or 20,000 of a mix, as in the paper's datasets."""
    return (MIXES[mix](np.random.default_rng(seed), _DRAWN) if mix in MIXES else read_length_list(mix)).tolist()


class Facts(NamedTuple):
    """Figures of the training data; lengths are in tokens."""

    documents: int  # rows of pairs for preference data
    tokens: int
    longest: int
    mean_length: float
    tokens_seen_by_token: float  # mean, over all tokens, of the length of the token's document
    trained_share: float  # share of tokens that are trained


def facts(dataset: Dataset, trainer: str = "sft") -> Facts:
    """Return the figures of a tokenized dataset."""
    if trainer == "sft":
        lengths, trained = read_lengths(dataset), count_trained(dataset)
    else:
        from .preference import row_lengths  # TRL's other trainers take seconds to import

        lengths = row_lengths(dataset, trainer)
        trained = lengths.sum()
    total = int(lengths.sum())
    seen = float((lengths.astype(np.float64) ** 2).sum() / total)
    return Facts(len(lengths), total, int(lengths.max()), float(lengths.mean()), seen, float(trained / total))


def random_documents(lengths: list[int], *, vocab_size: int, seed: int) -> Dataset:
    """Make documents of these lengths from random tokens, all of them trained."""
    total, rng = sum(lengths), np.random.default_rng(seed)
    ids = rng.integers(min(_FIRST_WORD, vocab_size - 1), vocab_size, size=total, dtype=np.int64)
    column = pa.ListArray.from_arrays(np.cumsum([0, *lengths]).astype(np.int32), pa.array(ids))
    return Dataset(pa.table({"input_ids": column, "labels": column}))


def read_documents(setup: Setup) -> Documents:
    """Read lengths for random tokens, or the splits of a dataset; refuse no data or too little. No model is needed."""
    if setup.bench.lengths is not None:
        lengths = every_length(setup.bench.lengths, seed=setup.args.seed)
        _require_a_step(len(lengths), setup)
        return lengths
    return _named_parts(setup)


def save_documents(setup: Setup, documents: Documents, model: str, folder: Path) -> dict[str, Any]:
    """Tokenize and cut the documents from [`read_documents`], hold some out, and save both parts.

    Returns the packing report of each part, which says what was lost.
    """
    parts, reports = _parts(setup, documents, model), {}
    if setup.bench.trainer == "sft":
        limits: Any = {"max_length": setup.args.max_length, "overflow": setup.args.overflow, "as_padded": True}
        for name, part in parts.items():
            parts[name], reports[name] = cut_dataset(part, name=name, **limits)
    for name, dataset in parts.items():
        columns = ["input_ids", "labels"] if setup.bench.trainer == "sft" else dataset.column_names
        dataset.select_columns(columns).save_to_disk(folder / name)
    return {name: report.to_dict() for name, report in reports.items()}


def _parts(setup: Setup, documents: Documents, model: str) -> dict[str, Dataset]:
    """Return the tokenized splits, not cut yet; pairs are cut."""
    trainer, args = setup.bench.trainer, setup.args
    if isinstance(documents, list):
        vocab_size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        if trainer == "sft":
            return _hold_out(random_documents(documents, vocab_size=vocab_size, seed=args.seed), setup)
        from .preference import random_pairs

        lengths = [min(length, args.max_length or length) for length in documents]
        pairs = random_pairs(lengths, trainer, vocab_size=vocab_size, first=_FIRST_WORD, seed=args.seed)
        return _hold_out(pairs, setup)
    tokenizer = AutoTokenizer.from_pretrained(setup.bench.tokenizer or model)
    if trainer == "sft":
        return {name: tokenized(part, tokenizer, args, name=name).dataset for name, part in documents.items()}
    from . import preference

    return preference.tokenized(documents, trainer, tokenizer, args)


def _named_parts(setup: Setup) -> dict[str, Dataset]:
    """Return the splits for training and validation."""
    name = setup.bench.dataset or setup.script.dataset_name
    if setup.mixture.datasets:
        found: Any = get_dataset(setup.mixture)
    elif name:
        found = load_dataset_dict(name, config=setup.script.dataset_config)
    else:
        raise InvalidConfig("no data.", do="Pass --dataset, or --lengths for random tokens of given lengths.")
    split, held_out = setup.script.dataset_train_split, setup.script.dataset_test_split
    if split not in found:
        raise InvalidDataset(
            f"the dataset has no split '{split}', only {sorted(found)}.", do="Set dataset_train_split."
        )
    documents = found[split]
    if setup.bench.documents is not None:
        documents = documents.select(range(min(setup.bench.documents, len(documents))))
    if held_out in found and setup.bench.eval_documents:
        few = min(setup.bench.eval_documents, len(found[held_out]))
        return {"train": documents, "eval": found[held_out].select(range(few))}
    return _hold_out(documents, setup)


def _hold_out(dataset: Dataset, setup: Setup) -> dict[str, Dataset]:
    kept = _require_a_step(len(dataset), setup)
    parts = {"train": dataset.select(range(kept))}
    return {**parts, "eval": dataset.select(range(kept, len(dataset)))} if kept < len(dataset) else parts


def _require_a_step(documents: int, setup: Setup) -> int:
    """Return the number of training documents without the held-out ones; refuse too few for an optimizer step."""
    kept = documents - setup.bench.eval_documents
    needed = setup.args.per_device_train_batch_size * setup.args.gradient_accumulation_steps
    if kept < needed:
        raise InvalidDataset(
            f"{documents} documents, {setup.bench.eval_documents} held out: less than the {needed} of one step.",
            do="Use a larger dataset, or lower eval_documents or the batch.",
        )
    return kept
