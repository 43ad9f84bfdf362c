"""The report of the proof of `unpad=True`: measurements and verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ..errors import ContaminationError

# The control must be larger than this, or the comparison has no power.
_VISIBLE = 1e-4
# A line of a report's table: verdict, words, value (`None` if it was not measured), limit, and whether it is kept.
Line: TypeAlias = "tuple[str, str, float | None, str, bool]"


def table_rows(lines: Iterable[Line]) -> list[dict[str, str]]:
    """Return the rows of a table for the terminal, without the lines that were not measured."""
    return [
        {"verdict": verdict, "what": what, "measured": number(value), "allowed": allowed, "": "yes" if kept else "NO"}
        for verdict, what, value, allowed, kept in lines
        if value is not None
    ]


def number(value: float | None) -> str:
    """Return a measured value as the reports show it."""
    return "not measured" if value is None else f"{value:.1e}"


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Result of comparing rows that run in another way with the same rows as they are."""

    # Worst relative difference of a layer or output, and its limit from rounding.
    difference: float
    allowed: float
    # The same for the gradient of a trained parameter; `None` if nothing trains.
    gradients: float | None
    gradients_allowed: float | None
    control: float  # difference with a known fault, which must be large enough to see
    first: str | None  # the first module beyond its limit
    first_gradient: str | None  # the worst parameter, if it is beyond its limit

    @property
    def verdict(self) -> str:
        """The verdict for these rows: `exact`, `differs` or `no power`."""
        if not self.control > _VISIBLE:
            return "no power"
        same = self.difference <= self.allowed and self.first is None
        same_gradients = self.gradients is None or self.gradients <= (self.gradients_allowed or 0.0)
        return "exact" if same and same_gradients else "differs"

    def _shown_gradients(self) -> str:
        if self.gradients is None:
            return "nothing trains"
        return f"gradients {self.gradients:.1e} (allowed {self.gradients_allowed:.1e})"


@dataclass(frozen=True, kw_only=True)
class SharingReport(ComparisonReport):
    """Result of comparing rows that compute a common prefix once with the same rows run separately.

    The control lets a branch see the one before it.
    """

    def __str__(self) -> str:
        return (
            f"{self.verdict}: prefixes once against in each row {self.difference:.1e} (allowed {self.allowed:.1e}), "
            f"{self._shown_gradients()}, branches that see each other {self.control:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class UnpaddingReport(ComparisonReport):
    """Result of comparing padded rows with and without their pads. The control leaves the pads visible."""

    against: str  # the reference: `padded` rows, or, if the model's own padded rows see their pads, documents `alone`
    pads_seen: float  # with the reference `alone`, the difference of padded rows from their documents alone; else 0
    # Difference of left-padded rows whose positions count from the pads on, as the model counts without
    # `position_ids`. It is large for learned positions.
    unshifted: float
    dtype: str
    seconds: float
    blocks: bool = False  # whether tokens of the rows saw each other in both directions, as those of an image do
    # Whether rows padded on the left run without their pads, too. Pooling that reads the first column of a row reads a
    # pad there: then such rows run with their pads, as without a patch.
    takes_left: bool = True
    sharing: SharingReport | None = None  # if the model is patched with `share_prefixes=True` and can share

    @property
    def is_exact(self) -> bool:
        """True if rows give the same results without their pads, and with shared prefixes if they share them."""
        return self.verdict == "exact" and (self.sharing is None or self.sharing.verdict == "exact")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON, with the verdict."""
        shared = None if self.sharing is None else {"verdict": self.sharing.verdict, **asdict(self.sharing)}
        return {"verdict": self.verdict, **asdict(self), "sharing": shared}

    def measurements(self) -> list[Line]:
        """List what was measured, for [`table_rows`]."""
        without, against = self.verdict == "exact", f"padded batches without pads, against {self.against}"
        by, limit = self.gradients, number(self.gradients_allowed)
        lines: list[Line] = [
            ("unpadding", against, self.difference, number(self.allowed), without),
            ("", "worst parameter, with pads against without", by, limit, without),
        ]
        if (shared := self.sharing) is not None:
            allowed, limit, same = number(shared.allowed), number(shared.gradients_allowed), self.is_exact
            lines += [
                ("sharing", "prefixes once, against in each row", shared.difference, allowed, same),
                ("", "worst parameter, once against in each", shared.gradients, limit, same),
            ]
        return lines

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of a table for the terminal: each measurement with its limit."""
        seen, limit = self.verdict != "no power", f"> {_VISIBLE:.0e}"
        return table_rows([*self.measurements(), ("control", "pads left visible: not 0", self.control, limit, seen)])

    def __str__(self) -> str:
        text = (
            f"{self.verdict}: without pads against {self.against} {self.difference:.1e} (allowed {self.allowed:.1e}), "
            f"{self._shown_gradients()}, pads left visible {self.control:.1e} [{self.dtype}]"
        )
        if self.blocks:
            text += "; with tokens that see each other in both directions, as those of an image do"
        if self.pads_seen:
            text += (
                f"; this model's own padded rows are {self.pads_seen:.1e} from their documents alone: positions or "
                "states run through the pads"
            )
        if self.unshifted > max(self.allowed, _VISIBLE):
            text += (
                f"; positions count from each row's first token: left-padded rows whose positions count from the pads "
                f"on are {self.unshifted:.1e} away"
            )
        return text

    def require_exact(self) -> None:
        """Raise [`ContaminationError`] unless the verdict is `exact`, with the numbers and the first wrong module."""
        if self.is_exact:
            return
        of_sharing = self.verdict == "exact"
        measured: Any = self.sharing if of_sharing else self
        why = [f"first in module '{measured.first}'"] if measured.first else []
        why += [f"worst in the gradient of '{measured.first_gradient}'"] if measured.first_gradient else []
        if of_sharing:
            raise ContaminationError(
                f"rows that share a prefix are not exact on this model: {measured}",
                why=why or ["letting a branch see another changes nothing: this model mixes no tokens"],
                do="Patch it with share_prefixes=False, or with another backend, and please report it.",
            )
        raise ContaminationError(
            f"padded batches without their pads are not exact on this model: {self}",
            why=why or ["making pads visible changes nothing: this model mixes no tokens, or its weights are zero"],
            do="Patch it with unpad=False, or with another backend, and please report it."
            if self.verdict != "no power"
            else "If the model is new, fill its matrices of zeros with small random values (torch.nn.init.normal_, "
            "std=1e-3) before patching, or train its first steps padded.",
        )
