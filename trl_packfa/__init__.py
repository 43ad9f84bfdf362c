"""trl-packfa: exact sequence packing for TRL.

No example sees another, an optimizer step sees what it saw padded, and no T x T mask is built anywhere.
Importing this package imports neither transformers nor trl; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import describe as describe
    from .api import patch as patch
    from .api import patched as patched
    from .api import unpatch as unpatch
    from .attention import AttentionArguments as AttentionArguments
    from .collator import DataCollatorForPacking as DataCollatorForPacking
    from .config import PackedSFTConfig as PackedSFTConfig
    from .declaration import Patch as Patch
    from .drawing import plot as plot
    from .exactness import ExactnessReport as ExactnessReport
    from .exactness import check as check
    from .layout import PackedLayout as PackedLayout
    from .registry import register as register
    from .registry import registered as registered
    from .trainer import PackedSFTTrainer as PackedSFTTrainer

_HOME = {
    "AttentionArguments": "attention",
    "DataCollatorForPacking": "collator",
    "ExactnessReport": "exactness",
    "PackedLayout": "layout",
    "PackedSFTConfig": "config",
    "PackedSFTTrainer": "trainer",
    "Patch": "declaration",
    "check": "exactness",
    "describe": "api",
    "patch": "api",
    "patched": "api",
    "plot": "drawing",
    "register": "registry",
    "registered": "registry",
    "unpatch": "api",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl_packfa' has no attribute '{name}'")
    from .versions import require_versions

    require_versions(training=name in ("PackedSFTConfig", "PackedSFTTrainer"))
    globals()[name] = value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
