"""What the check measured, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import ContaminationError
from ..results import results

# A leak is told from rounding (regrouped experts) by staying this many times below what the control shows.
_SEPARATION = 30.0
_NOISE_FACTOR = 4.0
# The least that removing the boundaries must move, or the model mixes no tokens and nothing can be told.
_VISIBLE = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    """What the check measured, in standard deviations of the logits or relative to the gradients, and its verdict.

    Args:
        model_type (`str`), rung (`str`), backend (`str`), dtype (`str`), training (`str`):
            What was checked; `training` says what trains and how: adapter, quantization, gradient checkpointing.
        lengths (`tuple[int, ...]`), changed (`int`), seed (`int`):
            The documents in tokens, the number of the one that was replaced, and the seed of their tokens.
        isolation (`float`):
            Largest change of any other document's logits when one document is replaced; 0 is exact to the bit. Of a
            model with experts in half precision, the largest median over the documents' tokens, as rounding alone
            reroutes single tokens.
        input_gradients (`float` or `None`):
            The same of the gradients of the other documents' embeddings, in their standard deviations; `None` where
            the backbone embeds each document by itself.
        parity (`float`):
            Largest difference between a document packed, in one row or in two, and the same document alone; medians
            with experts in half precision.
        loss (`float`):
            Difference of the mean loss, packed under the collator's labels and of each document alone.
        gradients (`float` or `None`):
            Worst relative difference, over the parameters that train, between the packed gradient and the sum of the
            documents' own; with experts in half precision that of all parameters together. `None` if nothing trains.
        noise (`float`), gradient_noise (`float` or `None`):
            The same differences between documents alone and in a padded batch: rounding only.
        control (`float`):
            Isolation with the boundaries removed. A check that cannot see this has no power.
        threshold (`float`), gradient_threshold (`float` or `None`):
            What parity and gradients may be: a multiple of the noise, between a floor and a ceiling.
        first_leak (`str` or `None`), first_difference (`str` or `None`):
            First module whose output moved for another document; that differs from the document alone.
        seconds (`float`):
            What the check took.
        versions (`dict[str, str]`):
            Of the libraries.
    """

    model_type: str
    rung: str
    backend: str
    dtype: str
    training: str
    lengths: tuple[int, ...]
    changed: int
    seed: int
    isolation: float
    input_gradients: float | None
    parity: float
    loss: float
    gradients: float | None
    noise: float
    gradient_noise: float | None
    control: float
    threshold: float
    gradient_threshold: float | None
    first_leak: str | None = None
    first_difference: str | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_isolated(self) -> bool:
        """No document saw another, forwards or backwards: nothing moved, or rounding and far less than a leak."""
        moved = max(self.isolation, self.input_gradients or 0.0)
        noise = max(self.noise, self.gradient_noise or 0.0)
        return moved <= min(_NOISE_FACTOR * noise, self.control / _SEPARATION) and self.isolation == self.isolation

    @property
    def has_power(self) -> bool:
        """Whether the control leaked where it had to."""
        return self.control > _VISIBLE

    @property
    def has_parity(self) -> bool:
        """Whether the packed logits are those of the documents alone."""
        return self.parity <= self.threshold

    @property
    def has_loss(self) -> bool:
        """Whether the packed labels make the loss of the documents alone."""
        return self.loss <= self.threshold

    @property
    def has_gradients(self) -> bool:
        """Whether the packed gradient is the sum of the documents' own."""
        return self.gradients is None or self.gradients <= (self.gradient_threshold or 0.0)

    @property
    def is_exact(self) -> bool:
        """Isolated, equal to alone, and shown by a test that could have failed."""
        return self.verdict == "exact"

    @property
    def verdict(self) -> str:
        """`exact`, `leak`, `differs` or `no power`."""
        if not self.has_power:
            return "no power" if self.isolation == 0 else "leak"
        if not self.is_isolated:
            return "leak"
        return "exact" if self.has_parity and self.has_loss and self.has_gradients else "differs"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the verdict included."""
        return {"verdict": self.verdict, **asdict(self)}

    def rows(self) -> list[dict[str, str]]:
        """For a terminal: each measurement with what it may be."""
        isolation = f"{min(_NOISE_FACTOR * self.noise, self.control / _SEPARATION):.1e}"
        gradients = _number(self.gradient_threshold)
        lines = [
            ("isolation", "other documents' logits when one is replaced", self.isolation, isolation, self.is_isolated),
            ("", "gradients of their embeddings", self.input_gradients, isolation, self.is_isolated),
            ("parity", "packed against each document alone", self.parity, f"{self.threshold:.1e}", self.has_parity),
            ("", "loss under the collator's labels", self.loss, f"{self.threshold:.1e}", self.has_loss),
            ("gradients", "packed against the documents' sum", self.gradients, gradients, self.has_gradients),
            ("control", "isolation without boundaries: must leak", self.control, f"> {_VISIBLE:.0e}", self.has_power),
        ]
        return [
            {"verdict": name, "what": what, "measured": _number(value), "allowed": allowed, "": "yes" if ok else "NO"}
            for name, what, value, allowed, ok in lines
            if value is not None  # nothing trains: there is no gradient
        ]

    def __str__(self) -> str:
        gradients = "not measured, nothing trains"
        if self.gradients is not None:
            gradients = f"{self.gradients:.1e} (allowed {_number(self.gradient_threshold)})"
        return (
            f"{self.verdict}: isolation {self.isolation:.1e}, "
            f"parity {self.parity:.1e} (allowed {self.threshold:.1e}), "
            f"gradients {gradients}, "
            f"without boundaries {self.control:.1e} "
            f"[{self.model_type}, rung {self.rung}, {self.backend}, {self.dtype}, {self.training}]"
        )

    def require_exact(self) -> None:
        """Raise unless the verdict is `exact`.

        Raises:
            [`ContaminationError`]: with the numbers and the first module that leaked or differs.
        """
        if self.is_exact:
            return
        known = results().get(self.model_type, {})
        reasons = self._reasons()
        if known.get("unpatched") not in (None, "exact"):
            reasons.append(
                f"unpatched, {self.model_type} {known['unpatched']} under TRL's keys; its patch: {known['why']}"
            )
        raise ContaminationError(
            f"packing is not exact on this model: {self}",
            why=reasons,
            do="Try attention_backend='reference' to tell kernel from patch, train padded with packing=False, and "
            "please report it. check_packing=False trains without this proof.",
        )

    def _reasons(self) -> list[str]:
        if self.verdict == "no power":
            return ["removing the boundaries changed nothing: this model mixes no tokens, or its weights are zero"]
        if self.verdict == "leak":
            return [f"replacing document {self.changed} changed other documents; first in module '{self.first_leak}'"]
        reasons: list[str] = []
        if not self.has_parity:
            where = f"; first in module '{self.first_difference}'" if self.first_difference else ""
            reasons.append(f"a document's logits differ from those of the same document alone{where}")
        if self.has_parity and not self.has_loss:
            reasons.append("the collator's labels do not make the documents' own loss: a boundary is not masked")
        if not self.has_gradients:
            reasons.append("the packed gradient is not the sum of the documents' own")
        return reasons


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
