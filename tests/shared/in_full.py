"""How much the tests of several processes run: one scenario of each kind, or all with `IN_FULL=1`, which
`make test-exhaustive` sets."""

import os

import pytest

IN_FULL = "IN_FULL" in os.environ
LAUNCHES = [pytest.mark.slow, *([pytest.mark.exhaustive] if IN_FULL else [])]


def chosen(scenarios, *names):
    """Return these scenarios, or all of them in full."""
    return {name: options for name, options in scenarios.items() if IN_FULL or name in names}
