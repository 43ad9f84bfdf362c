"""Models and datasets by name or path, through the ordinary loading code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def _loaded(shown: str, *args: Any, **options: Any) -> Any:
    """`datasets.load_dataset`, whose errors are the user's to mend; an empty file ends in a `StopIteration`."""
    try:
        return load_dataset(*args, **options)
    except StopIteration as error:
        raise InvalidDataset(f"the dataset '{shown}' is empty.", do="Check the file.") from error
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise InvalidDataset(
            f"cannot load the dataset '{shown}'.",
            why=[str(error.__cause__ or error)],
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
            f"cannot load the model '{name}'.", why=[str(error)], do="Check the name, or the path of a folder."
        ) from error


def load_causal_lm(name: str, *, dtype: str = "auto", adapter: str | None = None) -> nn.Module:
    """A causal LM by name or path, perhaps with a PEFT adapter on it.

    Raises:
        [`UnsupportedModel`]: if there is no such model.
    """
    with telling_of_model(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model if adapter is None else PeftModel.from_pretrained(model, adapter, is_trainable=True)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model by name or path, `None` where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # what transformers raises for a folder of weights only
        return None
