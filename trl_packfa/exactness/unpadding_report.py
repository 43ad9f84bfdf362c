"""What the proof of `unpad=True` has measured, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ContaminationError

# The least that pads seen by the model must move, or the comparison has no power.
_VISIBLE = 1e-4


@dataclass(frozen=True, kw_only=True)
class SharingReport:
    """What rows are that compute once what they begin with, against the same rows by themselves.

    Args:
        difference (`float`), allowed (`float`):
            Worst layer or output, relative; and what rounding may make there.
        gradients (`float` or `None`), gradients_allowed (`float` or `None`):
            The same of the worst parameter that trains; `None` if nothing trains.
        control (`float`):
            The same comparison with a branch that sees the one before it, which must show.
        first (`str` or `None`), first_gradient (`str` or `None`):
            The first module, and the worst parameter, beyond what is allowed.
    """

    difference: float
    allowed: float
    gradients: float | None
    gradients_allowed: float | None
    control: float
    first: str | None
    first_gradient: str | None

    @property
    def verdict(self) -> str:
        """`exact`, `differs` or `no power`."""
        return _verdict(self)

    def __str__(self) -> str:
        return (
            f"{self.verdict}: prefixes once against in each row {self.difference:.1e} (allowed {self.allowed:.1e}), "
            f"{_gradients(self)}, branches that see each other {self.control:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class UnpaddingReport:
    """What padded rows are without their pads.

    Args:
        difference (`float`), allowed (`float`):
            Worst layer or output, with pads against without, relative; and what rounding may make there.
        gradients (`float` or `None`), gradients_allowed (`float` or `None`):
            The same of the worst parameter that trains; `None` if nothing trains.
        against (`str`):
            What the rows were compared with: `padded` rows, or, where the model's own padded rows see their pads, each
            document `alone`.
        pads_seen (`float`):
            In the second case, how far padded rows are from their documents alone; 0 in the first.
        unshifted (`float`):
            How far left-padded rows are whose positions the model counts from the pads on, as it does when it is
            called without `position_ids`; large for learned positions.
        control (`float`):
            The same comparison with the pads left visible, which must show.
        first (`str` or `None`), first_gradient (`str` or `None`):
            The first module, and the worst parameter, beyond what is allowed.
        dtype (`str`), seconds (`float`):
            What was measured, and how long it took.
        sharing ([`SharingReport`] or `None`):
            Rows that begin alike, of a model patched with `share_prefixes=True` whose rows share what they begin with.
    """

    difference: float
    allowed: float
    gradients: float | None
    gradients_allowed: float | None
    against: str
    pads_seen: float
    unshifted: float
    control: float
    first: str | None
    first_gradient: str | None
    dtype: str
    seconds: float
    sharing: SharingReport | None = None

    @property
    def verdict(self) -> str:
        """`exact`, `differs` or `no power`, of the rows without pads, each by itself."""
        return _verdict(self)

    @property
    def is_exact(self) -> bool:
        """Whether rows without pads are what they are with them, and what they are if they share their prefixes."""
        return self.verdict == "exact" and (self.sharing is None or self.sharing.verdict == "exact")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the verdict included."""
        shared = None if self.sharing is None else {"verdict": self.sharing.verdict, **asdict(self.sharing)}
        return {"verdict": self.verdict, **asdict(self), "sharing": shared}

    def __str__(self) -> str:
        text = (
            f"{self.verdict}: without pads against {self.against} {self.difference:.1e} (allowed {self.allowed:.1e}), "
            f"{_gradients(self)}, pads left visible {self.control:.1e} [{self.dtype}]"
        )
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
        """Raise unless the verdict is `exact`.

        Raises:
            [`ContaminationError`]: with the numbers and the first module or parameter that differs.
        """
        if self.is_exact:
            return
        of_sharing = self.verdict == "exact"
        measured: Any = self.sharing if of_sharing else self
        why = [f"first in module '{measured.first}'"] if measured.first else []
        why += [f"worst in the gradient of '{measured.first_gradient}'"] if measured.first_gradient else []
        if of_sharing:
            raise ContaminationError(
                f"rows that share what they begin with are not exact on this model: {measured}",
                why=why or ["a branch that sees another changes nothing: this model mixes no tokens"],
                do="Patch it with share_prefixes=False, or with another backend, and please report it.",
            )
        raise ContaminationError(
            f"padded batches without their pads are not exact on this model: {self}",
            why=why or ["visible pads change nothing: this model mixes no tokens, or its weights are zero"],
            do="Patch it with unpad=False, or with another backend, and please report it."
            if self.verdict != "no power"
            else "A model from scratch: give matrices that are zero small random values (torch.nn.init.normal_ with "
            "std=1e-3) before it is patched, or train its first steps padded.",
        )


def _verdict(report: SharingReport | UnpaddingReport) -> str:
    if not report.control > _VISIBLE:
        return "no power"
    same = report.difference <= report.allowed and report.first is None
    same_gradients = report.gradients is None or report.gradients <= (report.gradients_allowed or 0.0)
    return "exact" if same and same_gradients else "differs"


def _gradients(report: SharingReport | UnpaddingReport) -> str:
    if report.gradients is None:
        return "nothing trains"
    return f"gradients {report.gradients:.1e} (allowed {report.gradients_allowed:.1e})"
