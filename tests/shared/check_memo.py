"""Take the check of a model once in a process, for tests of something else than the check. Hundreds of tests train the
same small model, and the check was half of their time. The key is the product's own identity of a check, with what
only a test changes: hooks, and forwards that are set on classes. A test that breaks a model in another way is marked
`own_check`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl_packfa import candidates
from trl_packfa.checking import check_identity
from trl_packfa.trainers.sft import check_gate

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def _key(model: Any, *facts: str) -> tuple[Any, ...]:
    """The functions themselves are in the key, so that none of them ends and leaves its address to another."""
    modules = [
        (name, type(module).forward, *(tuple(vars(module)[hooks].values()) for hooks in _HOOKS))
        for name, module in model.named_modules()
    ]
    return check_identity(model), model.training, facts, tuple(modules)


def remembered(check: Callable, *names: str) -> Callable:
    """Return `check` with the exact reports of earlier calls; a report that is not exact is never kept."""
    reports: dict[Any, Any] = {}

    def checked(model, **options):
        key = _key(model, type(model).__name__, *(str(type(options.get(name))) for name in names))
        if key not in reports:
            report = check(model, **options)
            if not report.is_exact:
                return report
            reports[key] = report
        return reports[key]

    return checked


_TAKEN, _TAKEN_UNPADDED = check_gate.check, candidates.check_unpadding
PACKED = remembered(_TAKEN, "collator")
UNPADDED = remembered(_TAKEN_UNPADDED)


def remember(replace: Callable) -> None:
    """Replace both functions where trainers call them; `replace` is `setattr`, or that of `monkeypatch`."""
    replace(check_gate, "check", PACKED)
    replace(candidates, "check_unpadding", UNPADDED)


@contextmanager
def forgotten() -> Iterator[None]:
    """Take every check anew in this block."""
    remembering = check_gate.check, candidates.check_unpadding
    check_gate.check, candidates.check_unpadding = _TAKEN, _TAKEN_UNPADDED
    try:
        yield
    finally:
        check_gate.check, candidates.check_unpadding = remembering
