"""Datasets that were tokenized, labelled and cut once: how they are marked, read, and compared with a run.

The mark is in the description of the dataset, which `datasets` saves with it and keeps in a copy. A dataset that was
filtered since is an ordinary tokenized one: its number of documents is another.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from ..config.sft import PackedSFTConfig
from ..errors import InvalidConfig
from ..packing import PackingReport
from .dataset import read_lengths
from .templates import vocabulary_hash

_MARK = "trl_packfa_prepared"
# Arguments that decide the tokens, the labels and the cut.
_SETTINGS = (
    "max_length", "overflow", "expand_turns", "loss_by", "completion_only_loss", "assistant_only_loss", "eos_token",
    "chat_template_path", "dataset_text_field",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Mark of a prepared dataset: its settings as text, tokenizer and chat template by hash, and its report."""

    settings: dict[str, str]
    report: PackingReport
    documents: int

    @classmethod
    def of(cls, dataset: Any) -> Prepared | None:
        """Read the mark of a dataset; `None` if it has none, or other documents by now."""
        described = dataset.info.description if isinstance(dataset, Dataset) else ""
        if not (described or "").startswith(f'{{"{_MARK}"'):
            return None
        recorded = json.loads(described)[_MARK]
        if recorded["documents"] != len(dataset):
            return None
        return cls(recorded["settings"], PackingReport(**recorded["report"]), recorded["documents"])

    def require_same(self, settings: dict[str, str], *, name: str) -> None:
        """Refuse a run whose settings would make other documents."""
        differ = [key for key in settings if settings[key] != self.settings.get(key)]
        if differ:
            raise InvalidConfig(
                f"the {name} dataset was prepared with other settings.",
                why=[f"{key}: {self.settings.get(key)} then, {settings[key]} now" for key in differ],
                do="Pass what it was prepared with, or prepare the data again.",
            )


def settings_of(args: PackedSFTConfig, tokenizer: Any, chat_template: str | None, *, name: str) -> dict[str, str]:
    """Return the settings that decide the documents of a dataset, as text."""
    used = chat_template or getattr(tokenizer, "chat_template", None)  # a processor may have none
    template = hashlib.sha256(str(used).encode()).hexdigest()[:16]
    rows = args.strategy.fills_rows and name == "train"
    return {
        **{field: str(getattr(args, field)) for field in _SETTINGS},
        "documents are cut for filled rows": f"{rows}, {args.strategy.wraps and rows}",
        "tokenizer": vocabulary_hash(tokenizer),
        "chat template": template,
    }


def marked(dataset: Dataset, report: PackingReport, settings: dict[str, str]) -> Dataset:
    """Return the dataset with its mark."""
    recorded = {"settings": settings, "report": report.to_dict(), "documents": len(dataset)}
    copied = dataset.with_format(None)  # another object with an info of its own
    copied.info.description = json.dumps({_MARK: recorded})
    return copied


def save(splits: dict[str, Dataset], folder: str | Path) -> None:
    """Save prepared splits as `datasets` does, and count their tokens there, where each run finds the counts."""
    DatasetDict(**splits).save_to_disk(folder)
    for split in DatasetDict.load_from_disk(str(folder)).values():
        read_lengths(split)
