"""`trl-packfa prepare`, see `trainers/sft/prepare.py`."""

from __future__ import annotations

from ..versions import require_versions

HELP = "tokenize, cut and count the data of a run once, into a folder"


def run(argv: list[str]) -> int:
    """Prepare with these flags and return the exit code."""
    require_versions()
    from ..trainers.sft.prepare import prepare

    return prepare(argv)
