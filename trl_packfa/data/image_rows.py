"""Rows with images: rows that have none, and errors of images and processors that name the row.

An image is read and processed when its batch is made. So a bad one is found while training, and its error must say
where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset

from ..errors import InvalidDataset
from .dataset import tables

logger = get_logger(__name__)

Example = dict[str, Any]

# The columns that TRL reads images from: one image of each row, or a list of them.
COLUMNS = ("image", "images")
# The key of an example that says which row it is. It is removed before the example is collated.
ROW = "trl_packfa_row"
# Characters of an example's text in an error, if the number of its row is not known.
_SHOWN = 60


class NumberedRows(TorchDataset):
    """A dataset whose examples say which row they are. `name` is the dataset's in messages."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Example:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        """Return the examples of these rows. torch's loader calls it once for each batch."""
        try:
            examples = self.dataset.__getitems__(numbers)
        except Exception:
            self._refuse_unreadable(numbers)
            raise  # no column alone is at fault
        return [{**example, ROW: self._row(number)} for number, example in zip(numbers, examples, strict=True)]

    def _row(self, number: int) -> str:
        return f"row {number} of the {self.name} dataset"

    def _refuse_unreadable(self, numbers: list[int]) -> None:
        for column in self.dataset.column_names:
            alone = self.dataset.select_columns([column])
            for number in numbers:
                try:
                    alone[number]
                except Exception as error:
                    raise InvalidDataset(
                        f"{self._row(number)} cannot be read: its column '{column}'.",
                        why=[f"{type(error).__name__}: {error}"],
                        do="Repair the file, or leave the row out.",
                    ) from error


class NamingCollator:
    """A wrapper of TRL's collator of images. Where it fails, the error says which row it fails on.

    With `requires_images` it refuses examples without images too.
    """

    def __init__(self, collator: Callable[[list[Example]], Any], *, requires_images: bool = False) -> None:
        self.collator, self.requires_images = collator, requires_images

    def __call__(self, examples: Sequence[Example]) -> Any:
        """Collate with the wrapped collator."""
        for example in examples:
            self._require_image(example)
        try:
            return self._collate(examples)
        except Exception:
            self._refuse_rejected(examples)
            raise  # no row is at fault

    def _collate(self, examples: Sequence[Example]) -> Any:
        # Copies, because TRL's collator writes to the examples.
        return self.collator([{key: value for key, value in row.items() if key != ROW} for row in examples])

    def _require_image(self, example: Example) -> None:
        for column in COLUMNS:
            if column not in example:
                continue
            images = example[column]
            if images is None or (isinstance(images, list) and any(image is None for image in images)):
                raise _missing(_row_of(example), column)
            if self.requires_images and isinstance(images, list) and not images:
                raise without_image_in_parts(_row_of(example), column)

    def _refuse_rejected(self, examples: Sequence[Example]) -> None:
        """Raise the error of the first example that fails alone; do nothing if all of several fail."""
        failed: dict[int, Exception] = {}
        for number, example in enumerate(examples):
            try:
                self._collate([example])
            except Exception as alone:
                failed[number] = alone
        if failed and (len(failed) < len(examples) or len(examples) == 1):
            first = min(failed)
            raise rejected(examples[first], failed[first]) from failed[first]


def rejected(example: Example, error: Exception | str) -> InvalidDataset:
    """Return the error of an example that its processor rejects."""
    why = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    cut = "max_length" in why
    return InvalidDataset(
        f"{_row_of(example)} cannot be processed.",
        why=[why],
        do="Raise max_length, or set max_length=None: a cut leaves an image without some of its tokens."
        if cut
        else "Repair the row, or leave it out.",
    )


def _row_of(example: Example) -> str:
    if ROW in example:
        return example[ROW]
    text = next((example[key] for key in ("messages", "prompt", "text") if key in example), "")
    if isinstance(text, list) and text:
        text = text[0].get("content", "")
    if isinstance(text, list):  # parts of a message
        text = " ".join(str(part.get("text") or "") for part in text)
    return f"an example (it begins with {str(text).strip()[:_SHOWN]!r})"


def _missing(row: str, column: str) -> InvalidDataset:
    return InvalidDataset(
        f"{row} has no image: its column '{column}' is or holds None.",
        why=["TRL would train it on its text alone, without a word"],
        do=f"Add the image, leave the row out, or make it a text row: a column 'images' with [] instead of '{column}'."
        if column == "image"
        else "Add the image, leave the row out, or make it a text row: [].",
    )


def without_image_in_parts(row: str, column: str) -> InvalidDataset:
    """Return the error of a row without images where weights are sharded over ranks."""
    return InvalidDataset(
        f"{row} has no image (its column '{column}' is []), and the model's weights are sharded over ranks.",
        why=["the ranks gather the vision tower's weights together: a rank whose micro-batch has no image would not"],
        do="Leave such rows out, add an image to each, or train without FSDP2 and DeepSpeed ZeRO-3.",
    )


def look_at_images(dataset: Any, *, name: str, requires_images: bool = False) -> None:
    """Refuse rows whose image is missing, and tell of rows without images. Images and streams are not read."""
    if not isinstance(dataset, Dataset):
        return
    for column in COLUMNS:
        if column not in dataset.column_names:
            continue
        missing, counts = _count_images(dataset, column)
        if missing.any():
            raise _missing(f"row {int(missing.argmax())} of the {name} dataset", column)
        empty = np.flatnonzero(counts == 0)
        if len(empty) and requires_images:
            raise without_image_in_parts(f"row {empty[0]} of the {name} dataset", column)
        if 0 < len(empty) < len(dataset):
            logger.warning(
                "trl-packfa: %d of %d rows of the %s dataset have no image (row %d is the first). As in TRL, they "
                "train on their text.",
                len(empty), len(dataset), name, empty[0],
            )  # fmt: skip


def _count_images(dataset: Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each row, whether an image of it is `None`, and the number of its images."""
    missing, counts = [np.zeros(0, dtype=bool)], [np.zeros(0, dtype=np.int64)]
    for table in tables(dataset, column, batch_size=1000):
        for chunk in table[column].chunks:
            none = chunk.is_null().to_numpy(zero_copy_only=False)
            if hasattr(chunk.type, "value_type"):  # a list of images
                sizes = pc.call_function("list_value_length", [chunk]).fill_null(0).to_numpy(zero_copy_only=False)
                rows = np.repeat(np.arange(len(sizes)), sizes)
                none[rows[pc.call_function("list_flatten", [chunk]).is_null().to_numpy(zero_copy_only=False)]] = True
            else:
                sizes = np.ones(len(none), dtype=np.int64)
            missing.append(none)
            counts.append(sizes)
    return np.concatenate(missing), np.concatenate(counts)


def image_columns(dataset: Iterable[Any]) -> list[str]:
    """List the columns with images in a dataset's first example, under TRL's names."""
    return sorted(set(COLUMNS) & set(next(iter(dataset), {})))
