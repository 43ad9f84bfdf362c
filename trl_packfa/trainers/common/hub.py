"""Loading of models and datasets by name or path, and merging of adapters, with errors that say what to change."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers
from datasets import DatasetDict, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ...errors import InvalidConfig, InvalidDataset, UnsupportedModel

# Ends of the names of classes with a head that is no LM head.
_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForMaskedLM",
)  # fmt: skip
# Number of characters that a message shows of a line.
_SHOWN = 80
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_dataset_dict(
    name: str, *, config: str | None = None, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """Load a dataset of the Hub, a dataset folder, or a JSON, JSON Lines, Parquet, CSV or text file, also gzipped.

    A single file becomes the split `train`.

    Raises:
        [`InvalidDataset`]: if a file's type is not known, or if there is no dataset of this name.
    """
    source, options = name, {"name": config}
    if Path(name).is_file():
        suffix = Path(name.removesuffix(".gz")).suffix
        if suffix not in _BUILDERS:
            raise InvalidDataset(
                f"cannot tell the format of {name}.", do=f"Use one of {sorted(_BUILDERS)}, with or without .gz."
            )
        source, options = _BUILDERS[suffix], {"data_files": name}
    try:
        return load_dataset(source, streaming=streaming, **options)  # type: ignore[return-value]  # no split is asked
    except StopIteration as error:  # raised for an empty file
        raise InvalidDataset(f"the dataset '{name}' is empty.", do="Check the file.") from error
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise InvalidDataset(
            f"cannot load the dataset '{name}'.",
            why=missing_path(name) or _broken_line(name) or [str(error.__cause__ or error)],
            do="Check the name, or the path and the contents of the file.",
        ) from error


def _broken_line(name: str) -> list[str]:
    """Name the first line of a JSON Lines file that is no JSON; return `[]` for other files and whole ones."""
    if not Path(name).is_file() or Path(name.removesuffix(".gz")).suffix != ".jsonl":
        return []
    opened = gzip.open if name.endswith(".gz") else open
    with opened(name, "rt", encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                json.loads(line.strip() or "null")
            except ValueError as error:
                return [f"line {number} is no JSON ({error}): {line.strip()[:_SHOWN]}"]
    return []


def missing_path(name: str) -> list[str]:
    """Say that no file or folder has this name, and name a similar one; return `[]` if it may be on the Hub."""
    path = Path(name).expanduser()
    if path.exists():
        return []
    is_file = path.suffix in (*_BUILDERS, ".gz")
    near = get_close_matches(path.name, sorted(entry.name for entry in path.parent.glob("*")), n=1)
    meant = f"; did you mean {path.parent / near[0]}?" if near else ""
    # The Hub's names are NAME and OWNER/NAME.
    only_a_path = is_file or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if not (only_a_path or near):
        return []
    return [f"there is no such {'file' if is_file else 'folder'}{meant}"]


@contextmanager
def telling_of_model(name: str) -> Iterator[None]:
    """Turn transformers' errors about a model that cannot be loaded into one message."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"cannot load the model '{name}'.",
            why=missing_path(name)
            or [str(error) if Path(name).exists() else f"there is no such folder, and as a name on the Hub: {error}"],
            do="Check the name, or the path of a folder.",
        ) from error


def load_for_check(name: str, *, dtype: str, adapter: str | None) -> nn.Module:
    """Load a causal LM, a classifier or an encoder by name or path, optionally with a PEFT adapter."""
    with telling_of_model(name):
        config = AutoConfig.from_pretrained(name)
    saved, cls = next(iter(config.architectures or ()), ""), AutoModelForCausalLM
    if saved.endswith(_HEADS) or (is_encoder(config) and not saved.endswith(("ForCausalLM", "LMHeadModel"))):
        cls = getattr(transformers, saved, AutoModel)  # a name that the folder holds
    with telling_of_model(name):
        model: Any = cls.from_pretrained(name, dtype=dtype)
    if adapter is None:
        return model
    with telling_of_model(adapter):
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def is_encoder(config: PretrainedConfig) -> bool:
    """Tell whether a model of this type is an encoder, unless its class makes a causal LM of it."""
    # Decoders of other types have no such attribute.
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model by name or path; return `None` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # transformers raises these for a folder that holds only weights
        return None


def merge_adapter(
    adapter: str, output: str | Path, *, base: str | None = None, dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Merge an adapter into its base model and save model and tokenizer into a folder, new or empty; return both.

    The base is loaded again, unquantized. A QLoRA adapter was trained on the base's weights rounded to 4 bits. So the
    merged model differs from the trained one by that rounding, and is nearer to the original base.

    `base` is its name or path, if it has moved since the adapter was saved. `dtype` is that of the merged weights;
    `"auto"` is the dtype that the base was saved in.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidConfig(f"{output} is not empty.", do="Name a new folder.")
    named = _adapter_config(adapter).base_model_name_or_path
    base = base or named
    merged = _adapted(adapter, base, named, dtype).merge_and_unload()
    # The one that was saved with the adapter, else the base's.
    found = (load_tokenizer(name) for name in (adapter, base) if name is not None)
    tokenizer = next((tokenizer for tokenizer in found if tokenizer is not None), None)
    merged.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    return merged, tokenizer


def _adapter_config(adapter: str) -> Any:
    try:
        config: Any = PeftConfig.from_pretrained(adapter)
    except (ValueError, OSError) as error:
        raise UnsupportedModel(
            f"there is no adapter in '{adapter}'.",
            why=[str(error)],
            do="Name the output_dir of a run with use_peft=True. A full fine-tune has no adapter to merge.",
        ) from error
    if config.is_prompt_learning:
        raise InvalidConfig(
            f"{config.peft_type.value} has no weights to merge: it adds tokens.",
            do="Use it together with its base: peft.AutoPeftModelForCausalLM loads both.",
        )
    return config


def _adapted(adapter: str, base: str | None, named: str | None, dtype: str) -> PeftModel:
    """Load the base, as the adapter names it or another one, with the adapter on it; PEFT resizes embeddings."""
    if base is not None and base != named:
        with telling_of_model(base):
            model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        return PeftModel.from_pretrained(model, adapter)
    try:
        return AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"cannot load the base '{named}' of the adapter '{adapter}'.", why=[str(error)], do="Name it with --base."
        ) from error
