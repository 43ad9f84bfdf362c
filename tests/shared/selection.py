"""Which cases of a test `make test` leaves to `make test-all`."""

import pytest


def in_full(*values):
    """Parameters whose cases run in `make test-all` alone: the same lines as a case that `make test` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
