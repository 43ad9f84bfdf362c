"""Count of the function calls of Python code, which is more stable than its time."""

import sys


def calls_of(work):
    """Return the result of `work()` and the number of Python and C functions that it calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return result, count
