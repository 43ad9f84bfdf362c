"""The registry of patches by model type.

Built-in patches come from `trl_packfa.patches`. Patches of third parties come from the entry-point group
`trl_packfa.patches` or from `register_patch()`. A model type has one patch. A second one is an error that names both.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from transformers import PreTrainedConfig

from ..errors import InvalidConfig, UnsupportedModel
from .base import Patch
from .measured import results

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "trl_packfa.patches"


@cache
def _table() -> dict[str, Patch]:
    """Return the registry, from model type to patch. Fill it at first use, so that importing trl_packfa stays fast."""
    from . import PATCHES

    table: dict[str, Patch] = {}
    for built_in in PATCHES:
        _add(table, built_in)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        # The log names the entry point first, because its code may raise any error.
        logger.info("trl-packfa: loading a patch from %s", entry_point.value)
        third_party = entry_point.load()
        logger.info("trl-packfa: patch for %s from %s", third_party.model_types, entry_point.value)
        _add(table, third_party)
    return table


def _add(table: dict[str, Patch], new: Patch) -> None:
    for name in new.model_types:
        if name in table:
            raise InvalidConfig(
                f"two patches for model type '{name}'.",
                why=[_which(table[name]), _which(new)],
                do="Uninstall one of them, or give the new one another model type.",
            )
    table.update(dict.fromkeys(new.model_types, new))


def _which(patch: Patch) -> str:
    return f"one from {patch.origin}, level {patch.level}, for {', '.join(patch.model_types[:3])}"


def register_patch(new: Patch) -> None:
    """Add a patch for this process.

    Raises:
        [`InvalidConfig`]: if one of its model types already has a patch.
    """
    _add(_table(), new)


def registered_patches() -> dict[str, Patch]:
    """Return the patch of every model type that can be patched, in alphabetical order."""
    return dict(sorted(_table().items()))


def get_patch(config: PreTrainedConfig) -> Patch:
    """Return the patch for models with this config.

    Raise [`UnsupportedModel`] if there is none; the message names the most similar model types.
    """
    patch = get_patch_for_type(config.model_type)
    # One type may need two patches: Falcon has rotary models and ALiBi models.
    while patch.instead is not None and patch.instead.applies(config):
        patch = patch.instead.patch
    return patch


def find_patch_for_type(name: str) -> Patch | None:
    """Return the patch for a `config.model_type`, `None` if there is none."""
    return _table().get(name)


def get_patch_for_type(name: str) -> Patch:
    """Return the patch for a `config.model_type`.

    Raise [`UnsupportedModel`] if there is none, with the nearest names.
    """
    table = _table()
    if name not in table:
        near = get_close_matches(name, table, n=3)
        measured = results().get(name, {})
        known = [measured["why"]] if measured.get("verdict") == "refused" else []
        raise UnsupportedModel(
            f"there is no patch for model type '{name}'.",
            why=known or [f"nearest: {', '.join(near)}"] * bool(near),
            do="Declare a trl_packfa.Patch for it and pass it to register_patch() (see 'Writing a patch'), or train "
            "it padded with PackedSFTConfig(packing=False). `trl-packfa models` lists the types.",
        )
    return table[name]
