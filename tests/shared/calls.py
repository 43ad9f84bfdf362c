"""Calls of functions: how many Python code makes, which is more stable than its time, and the calls of one."""

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


def watched(monkeypatch, owner, name):
    """Return a list that will hold the positional arguments of every call of `owner.name`, which runs as before."""
    calls, own = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(args) or own(*args, **options))
    return calls
