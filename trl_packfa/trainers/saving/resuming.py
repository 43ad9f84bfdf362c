"""Identity of a run, written with each checkpoint, so that resuming on other data or another adapter is refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ...data.dataset import read_lengths
from ...data.templates import vocabulary_hash
from ...errors import InvalidConfig
from ...versions import __version__

logger = logging.getLogger(__name__)

_SAMPLED = 64
_NAMES = {"data": "training documents", "labels": "what is trained of them", "tokenizer": "tokenizer"}
# Fields of an adapter's config that are not compared: its origin, its start, settings that a resumed run may change,
# and its modules, which can be written in several ways.
_NO_PART = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision",
            "task_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}  # fmt: skip
# Number of differing modules that a message names.
_SHOWN = 3


def identity(
    train_dataset: Any,
    tokenizer: Any,
    *,
    columns: Sequence[str] = ("input_ids",),
    labels: str = "labels",
    trained: int | None = None,
) -> dict[str, str]:
    """Hash the vocabulary and the tokenized documents (every length, some contents and labels; not for streams).

    `columns` hold token ids; a pair has several. `trained` is the number of tokens that have a label, if it is known.
    """
    found = {"version": __version__, "tokenizer": vocabulary_hash(tokenizer)}
    if isinstance(train_dataset, Dataset) and set(columns) <= set(train_dataset.column_names) and len(train_dataset):
        lengths = [read_lengths(train_dataset, column) for column in columns]
        digest, labelled = hashlib.sha256(), hashlib.sha256()
        for of in lengths:
            digest.update(of.data)
        # Lengths differ for nearly all other datasets. A few contents detect replaced or reordered documents.
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
    """Require that a checkpoint's run had this run's data; warn if it had another version of this package."""
    why = [
        f"{what} then: {before[name]}; now: {now[name]}"
        for name, what in _NAMES.items()
        if name in before and name in now and before[name] != now[name]
    ]
    if why:
        raise InvalidConfig(
            "the checkpoint is from a run on other data.",
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


# Arguments whose values the saved optimizer and schedule hold.
_KEPT = ("learning_rate", "weight_decay")
_PER_STEP = "rows_per_step"


def settings_of(args: Any) -> dict[str, Any]:
    """Return the arguments that a resumed run keeps, and the number of the dataset's rows in an optimizer step."""
    rows = args.data_parallel_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {_PER_STEP: rows, **{name: getattr(args, name) for name in _KEPT}}


def tell_changed(before: dict[str, Any], args: Any) -> None:
    """Warn about values that differ from the checkpoint's [`settings_of`], and say what that means for the run."""
    now = settings_of(args)
    differ = [name for name in now if name in before and before[name] != now[name]]
    for name in differ:
        if name != _PER_STEP:
            logger.warning(
                "trl-packfa: %s=%s has no effect. The optimizer and the schedule of the checkpoint go on with %s. To "
                "change it, begin a new run.", name, now[name], before[name],
            )  # fmt: skip
    if _PER_STEP in differ and not args.ignore_data_skip:
        logger.warning(
            "trl-packfa: a step holds %s rows of the dataset, in the checkpoint's run %s (processes x "
            "per_device_train_batch_size x gradient_accumulation_steps). The rows to skip are counted in steps of the "
            "new size, so some train twice or not at all in this epoch.", now[_PER_STEP], before[_PER_STEP],
        )  # fmt: skip


def adapter_of(model: Any) -> dict[str, Any]:
    """Return the fields of an adapter's config that decide its weights and effect, in JSON types; `{}` without one."""
    configs = getattr(model, "peft_config", None)  # PEFT's models have it, also if they are wrapped
    if not isinstance(configs, dict) or not configs:
        return {}
    active = getattr(model, "active_adapter", None)  # a name, or a function on models of other tuners
    config = configs[active if isinstance(active, str) and active in configs else next(iter(configs))].to_dict()
    # Initialization has no effect after the start.
    counted = [name for name in config if not name.startswith("init") and not name.endswith("_config")]
    fields = {name: _plain(config[name]) for name in counted if name not in _NO_PART}
    # The modules that PEFT has found, because "all-linear" and a list of names may mean the same modules.
    tuner = getattr(model, "base_model", model)
    fields["modules"] = _plain(set(getattr(tuner, "targeted_module_names", None) or ()))
    # Leave empty fields out, because another version of PEFT may have other unused fields.
    return {name: value for name, value in sorted(fields.items()) if value}


def _plain(value: Any) -> Any:
    """Convert a field's value to JSON types; sort lists, because the order of names has no meaning."""
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value))
    if isinstance(value, dict):
        return {str(name): _plain(of) for name, of in value.items()}
    value = getattr(value, "value", value)  # an enumeration's
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def require_same_adapter(before: dict[str, Any], model: Any) -> None:
    """Require a checkpoint's adapter to be this run's: PEFT would silently start weights that do not match anew."""
    if "adapter" not in before:  # written by another trainer or an earlier version
        return
    then, now = before["adapter"], adapter_of(model)
    differ = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if differ:
        raise InvalidConfig(
            "the checkpoint is from a run with another adapter.",
            why=[_difference(name, then.get(name), now.get(name)) for name in differ],
            do="Resume with the checkpoint's adapter, or start a new run with this one.",
        )


def _difference(field: str, then: Any, now: Any) -> str:
    if not (isinstance(then, list) and isinstance(now, list)):
        return f"{field} then: {then}; now: {now}"
    only = {"then": sorted({*then} - {*now}), "now": sorted({*now} - {*then})}
    sides = [f"{len(names)} only {when}: {', '.join(names[:_SHOWN])}" for when, names in only.items() if names]
    return f"{field}: {'; '.join(sides)}"
