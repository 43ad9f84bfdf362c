"""The measured results of every causal LM type of transformers: `models.json`, made by `tools/support_matrix.py`.

A type is trusted only while its modelling code, and what all types rely on, is the measured code, see `candidates.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn

# Files of transformers that all patches rely on, and the dispatch of attention in one more file.
_RELIED_ON = (
    "masking_utils.py", "modeling_flash_attention_utils.py", "modeling_layers.py", "modeling_rope_utils.py",
    "integrations/eager_paged.py", "integrations/flash_attention.py", "integrations/flex_attention.py",
    "integrations/moe.py", "integrations/sdpa_attention.py", "integrations/sdpa_paged.py",
)  # fmt: skip
_DISPATCH = re.compile(r"^class AttentionInterface\b.*?(?=^\S)", re.MULTILINE | re.DOTALL)

RESULTS = Path(__file__).with_name("models.json")
# Of the types with images or sounds, made by `tools/composite_matrix.py`.
COMPOSITES = Path(__file__).with_name("composites.json")
# Of encoders by head, made by `tools/encoder_matrix.py`.
ENCODERS = Path(__file__).with_name("encoders.json")
# Of runs of the causal LM types through the trainer, made by `tools/training_matrix.py`.
TRAINING = Path(__file__).with_name("training.json")


@cache
def read_committed(path: Path) -> dict[str, Any]:
    """Return the content of a committed file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


def results() -> dict[str, dict[str, Any]]:
    """Return the committed results by model type, for the newest measured transformers."""
    return read_committed(RESULTS)["types"]


def composites() -> dict[str, Any]:
    """Return the committed results of the types with images or sounds: `versions`, and `types` by model type."""
    return read_committed(COMPOSITES)


def encoders() -> dict[str, Any]:
    """Return the committed results of encoders: `versions`, and `types` by model type and head."""
    return read_committed(ENCODERS)


def training() -> dict[str, Any]:
    """Return the committed results of training: `versions`, and `types` by model type and by what trains."""
    return read_committed(TRAINING)


def measured_transformers() -> tuple[str, ...]:
    """Return the versions of transformers with which every type was measured, the oldest first."""
    return tuple(read_committed(RESULTS)["transformers"])


def measured_with() -> dict[str, str]:
    """Return the package versions of the committed results, by package name."""
    return {**read_committed(RESULTS)["versions"], "transformers": ", ".join(measured_transformers())}


@cache
def known_sources() -> dict[str, set[str]]:
    """Return the fingerprints of modelling code that was measured exact, by `config.model_type`.

    There is one for each measured version of transformers whose masks and attention interface are those installed.
    """
    installed, interfaces = interface_fingerprint(), read_committed(RESULTS)["interfaces"]
    known: dict[str, set[str]] = {}
    for result in results().values():
        if result.get("sources"):
            alike = (code for version, code in result["sources"].items() if interfaces[version] == installed)
            known.setdefault(result["config_type"], set()).update(alike)
    return known


@cache
def interface_fingerprint(package: Path = Path(transformers.__file__).parent) -> str:
    """Return a hash of the code of transformers that all patches rely on beside the modelling code.

    That is: masks, attention functions and their dispatch, rotary embeddings, layers, and experts' products.
    """
    digest = hashlib.sha256()
    for name in _RELIED_ON:
        path = package / name
        digest.update(path.read_bytes() if path.exists() else f"{name} is not there".encode())
    # Most of the file is about loading. The class ends where the next line begins that is not indented.
    found = _DISPATCH.search((package / "modeling_utils.py").read_text(encoding="utf-8"))
    digest.update(found.group().encode() if found else b"no dispatch")
    return digest.hexdigest()[:16]


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the code of all Python modules, of transformers or the user, that define a model's classes."""
    names = {type(module).__module__ for module in model.modules()}
    # torch is known by its version. Adapters and quantizers have their own tables.
    return _hash(tuple(sorted(name for name in names if not name.startswith(("torch.", "peft.", "bitsandbytes.")))))


@cache
def _hash(modules: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in modules:
        try:
            source = inspect.getsource(sys.modules[name])
        except (OSError, TypeError, KeyError):  # of a console, compiled, or deleted: it equals no measured code
            source = f"{name} has no source"
        digest.update(source.encode())
    return digest.hexdigest()[:16]
