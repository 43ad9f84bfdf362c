"""What was measured for every causal-LM type of transformers: `models.json`, made by `python tools/support_matrix.py`.

A type whose modelling code is no longer the code that was measured is not taken for exact, see `api.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

RESULTS = Path(__file__).with_name("models.json")


@cache
def _committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def results() -> dict[str, dict[str, Any]]:
    """Return the committed results by model type, under the newest transformers that was measured."""
    return _committed()["types"]


def measured_transformers() -> tuple[str, ...]:
    """Return the versions of transformers under which every type was measured, the oldest first."""
    return tuple(_committed()["transformers"])


def measured_with() -> dict[str, str]:
    """Return the versions of the packages with which the results were made, by name."""
    return {**_committed()["versions"], "transformers": ", ".join(measured_transformers())}


@cache
def known_sources() -> dict[str, set[str]]:
    """Return for each `config.model_type` the fingerprints of its modelling code under which it was found exact, one
    for each version of transformers that was measured."""
    known: dict[str, set[str]] = {}
    for result in results().values():
        if result.get("sources"):
            known.setdefault(result["config_type"], set()).update(result["sources"].values())
    return known


def fingerprint(model: nn.Module) -> str:
    """Hash of the code of all modules of transformers' (or the user's) that a model is made of."""
    names = {type(module).__module__ for module in model.modules()}
    # What these packages compute is known by their versions, and adapters and quantizers have tables of their own.
    return _hash(tuple(sorted(name for name in names if not name.startswith(("torch.", "peft.", "bitsandbytes.")))))


@cache
def _hash(modules: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in modules:
        try:
            source = inspect.getsource(sys.modules[name])
        except (
            OSError,
            TypeError,
            KeyError,
        ):  # defined in a console, compiled, or gone: like no code that was measured
            source = f"{name} has no source"
        digest.update(source.encode())
    return digest.hexdigest()[:16]
