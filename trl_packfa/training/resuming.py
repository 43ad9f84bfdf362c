"""What a run is made of, written beside each checkpoint, so that a resumed run is not silently another one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ..errors import InvalidConfig
from ..versions import __version__
from .dataset import read_lengths

logger = logging.getLogger(__name__)

_SAMPLED = 64
_NAMES = {"data": "training documents", "tokenizer": "tokenizer"}


def identity(train_dataset: Any, tokenizer: Any, *, columns: Sequence[str] = ("input_ids",)) -> dict[str, str]:
    """Hashes of the tokenized documents (every length, some contents; not for streams) and of the vocabulary.

    Args:
        train_dataset (`Dataset` or `IterableDataset`):
            Tokenized and cut.
        tokenizer (`PreTrainedTokenizerBase`):
            Of the run.
        columns (`Sequence[str]`, *optional*):
            That hold token ids; a pair's documents are in several.
    """
    found = {"version": __version__, "tokenizer": _vocabulary_hash(tokenizer)}
    if isinstance(train_dataset, Dataset) and set(columns) <= set(train_dataset.column_names) and len(train_dataset):
        lengths = [read_lengths(train_dataset, column) for column in columns]
        digest = hashlib.sha256(np.ascontiguousarray(np.concatenate(lengths), dtype=np.int64).tobytes())
        # Lengths tell nearly all other datasets; a few contents tell one whose documents were replaced or reordered.
        for i in np.linspace(0, len(train_dataset) - 1, num=min(_SAMPLED, len(train_dataset)), dtype=int):
            for column in columns:
                digest.update(np.asarray(train_dataset[int(i)][column], dtype=np.int64).tobytes())
        tokens = sum(int(of.sum()) for of in lengths)
        found["data"] = f"{len(train_dataset)} documents, {tokens} tokens, {digest.hexdigest()[:16]}"
    return found


def require_same_run(before: dict[str, Any], now: dict[str, str]) -> None:
    """Compare what a checkpoint was made with to this run; another version is named in the log.

    Raises:
        [`InvalidConfig`]: if the documents or the vocabulary are others: the epoch could not be gone on with.
    """
    why = [
        f"{_NAMES[name]} then: {before[name]}; now: {now[name]}"
        for name in _NAMES
        if name in before and name in now and before[name] != now[name]
    ]
    if why:
        raise InvalidConfig(
            "the checkpoint is of a run on other data.",
            why=why,
            do="Resume with the same dataset and tokenizer, or pass ignore_data_skip=True to begin a new epoch.",
        )
    if before.get("version", __version__) != __version__:
        logger.warning(
            "trl-packfa: the checkpoint was written by version %s, this is %s: rows may be packed differently.",
            before["version"],
            __version__,
        )


def _vocabulary_hash(tokenizer: Any) -> str:
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{token}\n".encode())
    return f"{len(vocabulary)} tokens, {digest.hexdigest()[:16]}"
