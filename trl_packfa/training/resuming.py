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
_NAMES = {"data": "training documents", "labels": "what is trained of them", "tokenizer": "tokenizer"}
# Fields of an adapter's config that say where it is from, how it began, what a resumed run may change, or in one of
# several ways which modules it is on.
_NO_PART = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision",
            "task_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}  # fmt: skip
# Modules that are named where they differ.
_SHOWN = 3


def identity(
    train_dataset: Any,
    tokenizer: Any,
    *,
    columns: Sequence[str] = ("input_ids",),
    labels: str = "labels",
    trained: int | None = None,
) -> dict[str, str]:
    """Hashes of the tokenized documents (every length, some contents and labels; not for streams) and of the
    vocabulary.

    Args:
        train_dataset (`Dataset` or `IterableDataset`):
            Tokenized and cut.
        tokenizer (`PreTrainedTokenizerBase`):
            Of the run.
        columns (`Sequence[str]`, *optional*):
            That hold token ids; a pair's documents are in several.
        labels (`str`, *optional*, defaults to `"labels"`):
            That says what is trained of a document, where there is such a column.
        trained (`int`, *optional*):
            Tokens that have a label.
    """
    found = {"version": __version__, "tokenizer": _vocabulary_hash(tokenizer)}
    if isinstance(train_dataset, Dataset) and set(columns) <= set(train_dataset.column_names) and len(train_dataset):
        lengths = [read_lengths(train_dataset, column) for column in columns]
        digest = hashlib.sha256(np.ascontiguousarray(np.concatenate(lengths), dtype=np.int64).tobytes())
        labelled = hashlib.sha256()
        # Lengths tell nearly all other datasets; a few contents tell one whose documents were replaced or reordered.
        for i in np.linspace(0, len(train_dataset) - 1, num=min(_SAMPLED, len(train_dataset)), dtype=int):
            if labels in train_dataset.column_names:
                labelled.update(np.asarray(train_dataset[int(i)][labels], dtype=np.int64).tobytes())
            for column in columns:
                digest.update(np.asarray(train_dataset[int(i)][column], dtype=np.int64).tobytes())
        tokens = sum(int(of.sum()) for of in lengths)
        found["data"] = f"{len(train_dataset)} documents, {tokens} tokens, {digest.hexdigest()[:16]}"
        if labels in train_dataset.column_names:
            count = "" if trained is None else f"{trained} tokens, "
            found["labels"] = f"{count}{labelled.hexdigest()[:16]}"
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
            do="Resume with the same dataset, tokenizer, completion_only_loss and assistant_only_loss, or pass "
            "ignore_data_skip=True to begin a new epoch.",
        )
    if before.get("version", __version__) != __version__:
        logger.warning(
            "trl-packfa: the checkpoint was written by version %s, this is %s: rows may be packed differently.",
            before["version"],
            __version__,
        )


def adapter_of(model: Any) -> dict[str, Any]:
    """The fields of a model's adapter's config that make its weights and what they do, in JSON's types; nothing for a
    model that is trained whole."""
    configs = getattr(model, "peft_config", None)  # of PEFT's models, whatever wraps them
    if not isinstance(configs, dict) or not configs:
        return {}
    active = getattr(model, "active_adapter", None)  # a name; of other tuners' models a function
    config = configs[active if isinstance(active, str) and active in configs else next(iter(configs))]
    fields = {name: _plain(value) for name, value in config.to_dict().items() if _counts(name)}
    # As PEFT has found them: "all-linear" and a list of names may be the same modules.
    tuner = getattr(model, "base_model", model)
    fields["modules"] = _plain(set(getattr(tuner, "targeted_module_names", None) or ()))
    # What is empty is left out: another version of PEFT may have other fields that are not used.
    return {name: value for name, value in sorted(fields.items()) if value}


def _counts(field: str) -> bool:
    """Whether a field of an adapter's config outlives its first step: initializations do not."""
    return field not in _NO_PART and not field.startswith("init") and not field.endswith("_config")


def _plain(value: Any) -> Any:
    """A field's value in JSON's types; the order of names means nothing."""
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value))
    if isinstance(value, dict):
        return {str(name): _plain(of) for name, of in value.items()}
    value = getattr(value, "value", value)  # an enumeration's
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def require_same_adapter(before: dict[str, Any], model: Any) -> None:
    """Compare the adapter of a checkpoint to that of this run: PEFT loads what it finds, and what it does not find
    begins anew.

    Raises:
        [`InvalidConfig`]: naming the fields that differ.
    """
    if "adapter" not in before:  # of another trainer, or an earlier version
        return
    then, now = before["adapter"], adapter_of(model)
    differ = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if differ:
        raise InvalidConfig(
            "the checkpoint is of a run with another adapter.",
            why=[_difference(name, then.get(name), now.get(name)) for name in differ],
            do="Resume with the checkpoint's adapter, or begin a run of its own with this one.",
        )


def _difference(field: str, then: Any, now: Any) -> str:
    if not (isinstance(then, list) and isinstance(now, list)):
        return f"{field} then: {then}; now: {now}"
    only = {"then": sorted({*then} - {*now}), "now": sorted({*now} - {*then})}
    sides = [f"{len(names)} only {when}: {', '.join(names[:_SHOWN])}" for when, names in only.items() if names]
    return f"{field}: {'; '.join(sides)}"


def _vocabulary_hash(tokenizer: Any) -> str:
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{token}\n".encode())
    return f"{len(vocabulary)} tokens, {digest.hexdigest()[:16]}"
