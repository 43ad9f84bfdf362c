"""`trl-packfa plan`, see `plan/run.py`."""

from __future__ import annotations

from ..versions import require_versions

HELP = "predict the effect of packing on a dataset, before you rent a GPU"


def run(argv: list[str]) -> int:
    """Plan with these flags and return the exit code."""
    require_versions()
    from ..plan.run import plan

    return plan(argv)
