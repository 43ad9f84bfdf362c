"""This version, and the oldest versions whose APIs it uses, said clearly instead of an ImportError deep inside.

TRL is what the trainer builds on, and its versions with the fused LM head need Python 3.11. Models are patched and
checked without it, on Python 3.10 too.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .errors import VersionTooOld

__version__ = "0.1.0"

MINIMUM_VERSIONS = {
    "torch": "2.6",
    "transformers": "5.20",
    "trl": "1.16",
    "peft": "0.19",
    "datasets": "4.7",
    "accelerate": "1.12",
}


def installed_version(package: str) -> str | None:
    """The installed version of a package, `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require_versions(*, training: bool = True) -> None:
    """Refuse packages that are too old.

    Args:
        training (`bool`):
            Whether the trainer is needed, and so TRL; without it, models can be patched and checked.

    Raises:
        [`VersionTooOld`]: naming each, the version found and the version needed.
    """
    needed = {package: least for package, least in MINIMUM_VERSIONS.items() if training or package != "trl"}
    found = {package: installed_version(package) for package in needed}
    why = [
        f"{package} {found[package] or 'is not installed'}, needed >= {least}"
        for package, least in needed.items()
        if found[package] is None or Version(found[package] or "0") < Version(least)
    ]
    if why:
        raise VersionTooOld("trl-packfa cannot run with the installed packages.", why=why, do=_remedy())


def _remedy() -> str:
    if sys.version_info < (3, 11):
        return "Use Python 3.11 or newer, which these versions need; patch() and check() work on Python 3.10."
    return "pip install --upgrade 'trl-packfa[tested]' installs versions that are tested together."
