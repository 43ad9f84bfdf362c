"""Datasets by name: of the Hub, a folder, or a file, with errors that say what to change."""

from __future__ import annotations

import gzip
import json
from difflib import get_close_matches
from pathlib import Path

from datasets import DatasetDict, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..errors import InvalidDataset

# Number of characters that a message shows of a line.
_SHOWN = 80
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_FILES = (*_BUILDERS, ".gz", ".yaml", ".yml")


def load_dataset_dict(
    name: str, *, config: str | None = None, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """Load a dataset of the Hub, a folder of one, prepared or not, or a JSON, JSON Lines, Parquet, CSV or text file.

    Files may be gzipped. A single file becomes the split `train`.

    Raises:
        [`InvalidDataset`]: if a file's type is not known, or if there is no dataset of this name.
    """
    if (Path(name) / "dataset_dict.json").is_file() and not streaming:  # `save_to_disk`, as `prepare` uses it
        return DatasetDict.load_from_disk(name)
    source, options = name, {"name": config}
    if Path(name).is_file():
        suffix = Path(name.removesuffix(".gz")).suffix
        if suffix not in _BUILDERS:
            raise InvalidDataset(
                f"cannot tell the format of {name}.", do=f"Use one of {sorted(_BUILDERS)}, with or without .gz."
            )
        source, options = _BUILDERS[suffix], {"data_files": name}
    try:
        if _is_path(name) and not Path(name).expanduser().exists():
            raise FileNotFoundError(name)  # the Hub would be asked for it, several times
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
    near = get_close_matches(path.name, sorted(entry.name for entry in path.parent.glob("*")), n=1)
    meant = f"; did you mean {path.parent / near[0]}?" if near else ""
    is_file = path.suffix in _FILES
    if not (_is_path(name) or is_file or near):
        return []
    return [f"there is no such {'file' if is_file else 'folder'}{meant}"]


def _is_path(name: str) -> bool:
    """Tell whether a name can be no name on the Hub: these are NAME and OWNER/NAME, and the latter may have a dot."""
    by_slashes = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    return "://" not in name and (by_slashes or ("/" not in name and Path(name).suffix in _FILES))
