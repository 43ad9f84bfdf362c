"""The table of what a run requires: its rows, the run that they are about, and the function that raises their errors.

Rows stand by what must be known for them. Their conditions say of which runs they are.

    config/arguments              ARGUMENTS, WITHOUT_PADS    when a config is made, and for late changes
    trainers/requirements/data    DATA, TEXTS                before weights are read: datasets, what a tokenizer makes
    trainers/requirements/runs    MACHINE, MODEL             before weights are read: this machine, the model's type
    trainers/requirements/runs    LAUNCH                     before a command loads anything
    trainers/requirements/built   BUILT, PATCHED             once the model is built, once it is patched

A row refuses by name. Where TRL, transformers or datasets refuse the same in clear words, there is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import InvalidConfig, PackingError
from ..packing import PADDED, Strategy


@dataclass(frozen=True)
class Run:
    """A run as far as it is known: its arguments, and the class of the config or trainer that errors name.

    An argument is an attribute of the run, `None` if the config has no such field.
    """

    args: Any
    name: str

    def __getattr__(self, argument: str) -> Any:
        # `copy` looks for methods; and a property may have raised an `AttributeError` of its own.
        if argument.startswith("__") or hasattr(type(self), argument):
            raise AttributeError(argument)
        return getattr(self.args, argument, None)

    @property
    def plan(self) -> Strategy:
        """The strategy of the config, `PADDED` if the config has none."""
        return self.strategy or PADDED

    @property
    def is_sft(self) -> bool:
        """`True` if the arguments are a `PackedSFTConfig`."""
        return self.loss_weighting is not None


class Found(NamedTuple):
    """A finding of a predicate, with reasons that only it knows."""

    value: Any
    why: Iterable[str]


@dataclass(frozen=True)
class Requirement:
    """A row of the table.

    `when` returns what contradicts the requirement in a run, anything falsy if nothing does. The texts are formatted
    with it as `found`, and with the run as `r`. A `PackingError` is raised as it is.
    """

    when: Callable[[Any], Any]
    what: str
    why: str = ""
    do: str = ""
    error: type[PackingError] = InvalidConfig
    shown: str = ""  # in the documentation instead of `what`, where that says too little without its values


def where(holds: Callable[[Any], Any], *rows: Requirement) -> tuple[Requirement, ...]:
    """Return rows that are about the runs for which a condition holds."""

    def both(when: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda run: holds(run) and when(run)

    return tuple(replace(row, when=both(row.when)) for row in rows)


def require(rows: Iterable[Requirement], run: Run) -> None:
    """Raise the error of the first row that a run does not meet."""
    for row in rows:
        found = row.when(run)
        if isinstance(found, PackingError):  # of the table of another part of the package
            raise found
        if found:
            why = found.why if isinstance(found, Found) else [row.why.format(r=run, found=found)] * bool(row.why)
            value = found.value if isinstance(found, Found) else found
            raise row.error(row.what.format(r=run, found=value), why=why, do=row.do.format(r=run, found=value))
