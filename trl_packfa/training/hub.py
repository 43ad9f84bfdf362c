"""Models and datasets by name or path, through the ordinary loading code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from datasets import DatasetDict, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..errors import InvalidDataset, UnsupportedModel

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_dataset_dict(
    name: str, *, config: str | None = None, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """A dataset of the Hub, a dataset folder, or a JSON, JSON Lines, Parquet, CSV or text file, perhaps gzipped.

    A single file becomes the split `train`.

    Raises:
        [`InvalidDataset`]: if a file's type is not known or the name leads nowhere.
    """
    path = Path(name)
    if path.is_file():
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if suffix not in _BUILDERS:
            raise InvalidDataset(
                f"cannot tell the format of {name}.", do=f"Use one of {sorted(_BUILDERS)}, perhaps with .gz."
            )
        return _loaded(name, _BUILDERS[suffix], data_files=name, streaming=streaming)
    return _loaded(name, name, name=config, streaming=streaming)


def missing_path(name: str) -> list[str]:
    """Say that a name leads to no file or folder here, and which nearly is one; nothing if it does, or can only be a
    name of the Hub."""
    path = Path(name).expanduser()
    if path.exists():
        return []
    is_file = path.suffix in (*_BUILDERS, ".gz")
    there = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    near = get_close_matches(path.name, there, n=1)
    meant = f"; did you mean {path.parent / near[0]}?" if near else ""
    # The Hub's names are NAME and OWNER/NAME.
    only_a_path = is_file or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if not only_a_path and not near:
        return []
    return [f"there is no such {'file' if is_file else 'folder'}{meant}"]


def _loaded(shown: str, *args: Any, **options: Any) -> Any:
    """`datasets.load_dataset`, whose errors are the user's to mend; an empty file ends in a `StopIteration`."""
    try:
        return load_dataset(*args, **options)
    except StopIteration as error:
        raise InvalidDataset(f"the dataset '{shown}' is empty.", do="Check the file.") from error
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise InvalidDataset(
            f"cannot load the dataset '{shown}'.",
            why=missing_path(shown) or [str(error.__cause__ or error)],
            do="Check the name, or the path and the contents of the file.",
        ) from error


@contextmanager
def telling_of_model(name: str) -> Iterator[None]:
    """What transformers raises where there is no such model, as one message.

    Raises:
        [`UnsupportedModel`]: if there is none, or of a type that this transformers does not know.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"cannot load the model '{name}'.",
            why=missing_path(name)
            or [str(error) if Path(name).exists() else f"no folder here, and as a name: {error}"],
            do="Check the name, or the path of a folder.",
        ) from error


def load_causal_lm(name: str, *, dtype: str = "auto", adapter: str | None = None) -> nn.Module:
    """A causal LM by name or path, perhaps with a PEFT adapter on it.

    Raises:
        [`UnsupportedModel`]: if there is no such model.
    """
    with telling_of_model(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    if adapter is None:
        return model
    with telling_of_model(adapter):
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model by name or path, `None` where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # what transformers raises for a folder of weights only
        return None
