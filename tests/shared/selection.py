"""Selection of the test cases that only `make test-all` or `make test-exhaustive` runs."""

import os

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
# The tests of several processes share a launch. It runs one scenario of each kind, or all of them with `IN_FULL=1`,
# which `make test-exhaustive` sets.
IN_FULL = "IN_FULL" in os.environ
LAUNCHES = EXHAUSTIVE if IN_FULL else (pytest.mark.slow,)


def chosen(scenarios, *names):
    """Return the scenarios of these names, or all of them in full."""
    return {name: options for name, options in scenarios.items() if IN_FULL or name in names}


def in_full(*values):
    """Mark parameters to run in `make test-all` only; a case of `make test` covers the same lines."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def exhaustive(*values):
    """Mark parameters to run in `make test-exhaustive` only; a case of `make test-all` is of the same kind. A tuple is
    one value for each parameter of the test."""
    return [pytest.param(*(value if isinstance(value, tuple) else [value]), marks=EXHAUSTIVE) for value in values]


def one_of_each(names, kinds, *, slow=()):
    """Mark all but the first name of each kind to run in `make test-exhaustive` only, and those that take longest."""
    seen = set()
    for name in names:
        is_first = kinds[name] not in seen and name not in slow
        if is_first:
            seen.add(kinds[name])
        yield pytest.param(name, marks=() if is_first else EXHAUSTIVE)


def in_turn(cases, values):
    """Pair each case with one of the values in turn; other pairs are exhaustive."""
    for number, case in enumerate(cases):
        for value in values:
            yield pytest.param(case, value, marks=() if value == values[number % len(values)] else EXHAUSTIVE)
