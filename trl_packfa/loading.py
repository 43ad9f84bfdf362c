"""Models and datasets by name or path, through the ordinary loading code."""

from __future__ import annotations

from pathlib import Path

from datasets import DatasetDict, IterableDatasetDict, load_dataset
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from .errors import InvalidDataset, UnsupportedModel

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
        return load_dataset(_BUILDERS[suffix], data_files=name, streaming=streaming)  # type: ignore[return-value]
    try:
        return load_dataset(name, name=config, streaming=streaming)  # type: ignore[return-value]
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise InvalidDataset(
            f"cannot load the dataset '{name}'.", why=[str(error)], do="Check the name, or the path of a file."
        ) from error


def load_causal_lm(name: str, *, dtype: str = "auto", adapter: str | None = None) -> nn.Module:
    """A causal LM by name or path, perhaps with a PEFT adapter on it.

    Raises:
        [`UnsupportedModel`]: if there is no such model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except OSError as error:
        raise UnsupportedModel(
            f"cannot load the model '{name}'.", why=[str(error)], do="Check the name, or the path of a folder."
        ) from error
    return model if adapter is None else PeftModel.from_pretrained(model, adapter)
