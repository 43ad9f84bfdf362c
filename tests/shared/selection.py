"""Selection of the test cases that only `make test-all` runs."""

import pytest


def in_full(*values):
    """Mark parameters to run in `make test-all` only; a case of `make test` covers the same lines."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
