"""The oldest versions whose APIs trl-packfa uses, said clearly instead of an ImportError deep inside."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from .errors import VersionTooOld

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


def require_versions() -> None:
    """Refuse packages that are too old.

    Raises:
        [`VersionTooOld`]: naming each, the version found and the version needed.
    """
    found = {package: installed_version(package) for package in MINIMUM_VERSIONS}
    why = [
        f"{package} {found[package] or 'is not installed'}, needed >= {needed}"
        for package, needed in MINIMUM_VERSIONS.items()
        if found[package] is None or Version(found[package] or "0") < Version(needed)
    ]
    if why:
        raise VersionTooOld(
            "trl-packfa cannot run with the installed packages.",
            why=why,
            do="pip install --upgrade 'trl-packfa[tested]' installs versions that are tested together.",
        )
