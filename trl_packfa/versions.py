"""The version of trl-packfa, the tested versions of other packages, and checks of the installed versions.

The trainers need TRL, and TRL's versions with the fused LM head need Python 3.11. Patching and checking a model do not
need TRL, so they work on Python 3.10 too. `make test-versions` tests both ends of every range.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .errors import VersionTooOld

logger = logging.getLogger(__name__)

__version__ = "0.1.0"


class Tested(NamedTuple):
    """The oldest and the newest tested version of a package."""

    oldest: str
    newest: str


TESTED = {
    "torch": Tested("2.7.0", "2.15.0"),  # PEFT 0.19 uses a dtype that torch 2.6 does not have
    "transformers": Tested("5.16.0", "5.24.0"),
    "trl": Tested("1.16.0", "1.16.0"),
    "peft": Tested("0.19.0", "0.21.2"),
    "datasets": Tested("4.7.0", "5.2.0"),
    "accelerate": Tested("1.12.0", "1.15.0"),
}

MINIMUM_VERSIONS = {package: tested.oldest.removesuffix(".0") for package, tested in TESTED.items()}


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def newer_than_tested() -> list[str]:
    """List the installed packages that are newer than the newest tested version, each with both versions.

    A patch release of a tested release (2.15.1 after 2.15.0) is not newer.
    """
    from packaging.version import Version  # here: tools/try_versions.py reads this file with a bare Python

    found = {package: installed_version(package) for package in TESTED}
    return [
        f"{package} {found[package]} (tested up to {tested.newest})"
        for package, tested in TESTED.items()
        if Version(found[package] or "0").release[:2] > Version(tested.newest).release[:2]
    ]


@cache
def tell_of_newer_versions() -> None:
    """Log one line, once per process, if a package is newer than tested."""
    if newer := newer_than_tested():
        logger.warning(
            "trl-packfa: newer than tested: %s. Each model is checked before it is trusted.", ", ".join(newer)
        )


def require_versions(*, training: bool = True) -> None:
    """Raise [`VersionTooOld`] with each package that is too old; only the trainers, `training`, need TRL."""
    from packaging.version import Version

    needed = {package: least for package, least in MINIMUM_VERSIONS.items() if training or package != "trl"}
    found = {package: installed_version(package) for package in needed}
    why = [
        f"{package} {found[package] or 'is not installed'}, needed >= {least}"
        for package, least in needed.items()
        if Version(found[package] or "0") < Version(least)
    ]
    if why:
        do = "pip install --upgrade 'trl-packfa[tested]' installs versions that are tested together."
        if sys.version_info < (3, 11):
            do = "Use Python 3.11 or newer, which these versions need; patch() and check() work on Python 3.10."
        raise VersionTooOld("trl-packfa cannot run with the installed packages.", why=why, do=do)
