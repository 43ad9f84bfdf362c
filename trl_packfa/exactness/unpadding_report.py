"""What the proof of `unpad=True` has measured, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ContaminationError

# The least that pads seen by the model must move, or the comparison has no power.
_VISIBLE = 1e-4


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

    @property
    def verdict(self) -> str:
        """`exact`, `differs` or `no power`."""
        if not self.control > _VISIBLE:
            return "no power"
        same = self.difference <= self.allowed and self.first is None
        same_gradients = self.gradients is None or self.gradients <= (self.gradients_allowed or 0.0)
        return "exact" if same and same_gradients else "differs"

    @property
    def is_exact(self) -> bool:
        """Whether rows without pads are what they are with them."""
        return self.verdict == "exact"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the verdict included."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        gradients = "nothing trains"
        if self.gradients is not None:
            gradients = f"gradients {self.gradients:.1e} (allowed {self.gradients_allowed:.1e})"
        text = (
            f"{self.verdict}: without pads against {self.against} {self.difference:.1e} (allowed {self.allowed:.1e}), "
            f"{gradients}, pads left visible {self.control:.1e} [{self.dtype}]"
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
        why = [f"first in module '{self.first}'"] if self.first else []
        why += [f"worst in the gradient of '{self.first_gradient}'"] if self.first_gradient else []
        raise ContaminationError(
            f"padded batches without their pads are not exact on this model: {self}",
            why=why or ["visible pads change nothing: this model mixes no tokens, or its weights are zero"],
            do="Patch it with unpad=False, or with another backend, and please report it.",
        )
