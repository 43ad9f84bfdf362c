"""trl-packfa: exact sequence packing for TRL.

Attention does not cross documents. Each optimizer step trains on the same tokens as a padded step. No T x T attention
mask is built. Importing this package imports neither transformers nor trl; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .versions import __version__ as __version__

if TYPE_CHECKING:
    from .api import patch as patch
    from .api import patched as patched
    from .api import unpatch as unpatch
    from .attention import AttentionArguments as AttentionArguments
    from .checking import CheckReport as CheckReport
    from .checking import check as check
    from .config.sft import PackedSFTConfig as PackedSFTConfig
    from .data.collator import DataCollatorForPacking as DataCollatorForPacking
    from .layout import PackedLayout as PackedLayout
    from .parallel.sequence_parallel import shard_batch as shard_batch
    from .patches.base import Patch as Patch
    from .patches.registry import register_patch as register_patch
    from .patching.describe import describe as describe
    from .trainers.padding_free.padding_free import padding_free as padding_free
    from .trainers.preference.dpo import PackedDPOConfig as PackedDPOConfig
    from .trainers.preference.dpo import PackedDPOTrainer as PackedDPOTrainer
    from .trainers.preference.kto import PackedKTOConfig as PackedKTOConfig
    from .trainers.preference.kto import PackedKTOTrainer as PackedKTOTrainer
    from .trainers.preference.reward import PackedRewardConfig as PackedRewardConfig
    from .trainers.preference.reward import PackedRewardTrainer as PackedRewardTrainer
    from .trainers.sft.trainer import PackedSFTTrainer as PackedSFTTrainer

_HOME = {
    "AttentionArguments": "attention",
    "CheckReport": "checking",
    "DataCollatorForPacking": "data.collator",
    "PackedDPOConfig": "trainers.preference.dpo",
    "PackedDPOTrainer": "trainers.preference.dpo",
    "PackedKTOConfig": "trainers.preference.kto",
    "PackedKTOTrainer": "trainers.preference.kto",
    "PackedLayout": "layout",
    "PackedRewardConfig": "trainers.preference.reward",
    "PackedRewardTrainer": "trainers.preference.reward",
    "PackedSFTConfig": "config.sft",
    "PackedSFTTrainer": "trainers.sft.trainer",
    "Patch": "patches.base",
    "check": "checking",
    "describe": "patching.describe",
    "padding_free": "trainers.padding_free.padding_free",
    "patch": "api",
    "patched": "api",
    "register_patch": "patches.registry",
    "shard_batch": "parallel.sequence_parallel",
    "unpatch": "api",
}

# These names need TRL's trainers, which need a newer Python than the rest of the package.
_NEEDS_TRL = {name for name, home in _HOME.items() if home.startswith(("train", "config"))}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl_packfa' has no attribute '{name}'")
    from .versions import require_versions, tell_of_newer_versions

    require_versions(training=name in _NEEDS_TRL)
    if name in _NEEDS_TRL:
        tell_of_newer_versions()
    globals()[name] = value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
