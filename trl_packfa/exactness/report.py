"""What the check measured, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import ContaminationError
from ..patches.measured import results
from .unpadding_report import UnpaddingReport

# The least that removing the boundaries must move, or the model mixes no tokens and nothing can be told.
_VISIBLE = 1e-4
# Two sums of the same losses.
_SAME_LOSS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    """What the check measured, and its verdict.

    Args:
        model_type (`str`), level (`str`), backend (`str`), dtype (`str`):
            What was checked.
        training (`str`), mode (`str`), tokens (`str`):
            What trains and how: adapter, quantization, gradient checkpointing; whether it was measured in training
            mode, in evaluation mode, or in both as they differ; whether the model knows the documents' tokens.
        lengths (`tuple[int, ...]`), seed (`int`):
            The documents in tokens, and the seed of what was drawn.
        layers (`str`):
            How many layers ran the many arrangements of documents, of how many that the model has.
        isolation (`float`):
            Largest change of any document's logits when others are replaced, in standard deviations of the logits.
            Must be 0. Of a model with experts, what remains when every layer is handed the same input.
        regrouped (`float`):
            The same of a model with experts before that: others' tokens change which tokens are multiplied together,
            and so how sums are rounded.
        input_gradients (`float` or `None`):
            Largest gradient of the embeddings of documents that have no loss, in standard deviations of that of those
            which have one. Must be 0. `None` where the backbone embeds each document by itself.
        parity (`float`):
            Largest difference between a document packed, in one row or in several, and the same document alone: of
            what comes out of one layer, token mixer or LM head that was handed the same input, relative to its size.
        threshold (`float`), noise (`float`):
            What parity may be, and what rounding alone makes there: the document again, everything off by up to a last
            place.
        loss (`float`):
            Difference between the mean loss under the collator's labels and under each document's own next tokens.
        gradients (`float` or `None`):
            Worst difference, over the parameters that train, between the packed gradient and the sum of the documents'
            own, relative to its norm. `None` if nothing trains.
        gradient_threshold (`float` or `None`), gradient_noise (`float` or `None`):
            What gradients may differ by, and what rounding alone makes there.
        control (`float`):
            Isolation with the boundaries removed. A check that cannot see this has no power.
        first_leak (`str` or `None`), first_difference (`str` or `None`), first_gradient (`str` or `None`):
            First module whose output moved for another document; that differs from the document alone; the parameter
            whose gradient is off worst.
        is_finite (`bool`):
            Whether the logits of the documents alone are finite.
        first_batch (`float` or `None`), first_batch_allowed (`float` or `None`):
            The trainer's first batch, packed against documents of it alone: difference of the log-probability of the
            typical token of the worst document, in nats, and what rounding may make of it; once training has begun.
        head (`float` or `None`), head_allowed (`float` or `None`):
            The LM head that trains, on that batch: its worst gradient against the one through the model's own logits.
        no_weight (`str`):
            Matrices that are zero, where the control could not see a leak.
        unpadding ([`UnpaddingReport`] or `None`):
            Padded batches without their pads against the same with them, of a model patched with `unpad=True`.
        seconds (`float`):
            What the check took.
        identity (`str`):
            Hash of what was proven, by which a run that resumes knows that it is the same; empty without a trainer.
        taken_from (`str`):
            The checkpoint that this proof was taken from by a run that resumed there; empty if it was made anew.
        versions (`dict[str, str]`):
            Of the libraries.
    """

    model_type: str = ""
    level: str = ""
    backend: str = ""
    dtype: str
    training: str = ""
    mode: str = ""
    tokens: str = ""
    lengths: tuple[int, ...]
    layers: str = ""
    seed: int = 0
    isolation: float
    regrouped: float = 0.0
    input_gradients: float | None
    parity: float
    threshold: float
    noise: float
    loss: float
    gradients: float | None
    gradient_threshold: float | None
    gradient_noise: float | None
    control: float
    first_leak: str | None = None
    first_difference: str | None = None
    first_gradient: str | None = None
    is_finite: bool = True
    first_batch: float | None = None
    first_batch_allowed: float | None = None
    head: float | None = None
    head_allowed: float | None = None
    no_weight: str = ""
    unpadding: UnpaddingReport | None = None
    seconds: float = 0.0
    identity: str = ""
    taken_from: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_isolated(self) -> bool:
        """No document saw another, forwards or backwards."""
        return self.isolation == 0 and not self.input_gradients

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
        return self.loss <= _SAME_LOSS

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
        """`exact`, `leak`, `differs`, `no power` or `not finite`."""
        # First, as numbers that are not finite make every other measurement meaningless.
        if not self.is_finite:
            return "not finite"
        # Before parity: a check that cannot see a leak where there must be one says nothing of its absence.
        if not self.has_power:
            return "no power" if self.isolation == 0 else "leak"
        if not self.is_isolated:
            return "leak"
        unpadded = self.unpadding is None or self.unpadding.is_exact
        return "exact" if self.has_parity and self.has_loss and self.has_gradients and unpadded else "differs"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the verdict included."""
        return {"verdict": self.verdict, **asdict(self)}

    def rows(self) -> list[dict[str, str]]:
        """For a terminal: each measurement with what it may be."""
        forward, gradients = f"{self.threshold:.1e}", _number(self.gradient_threshold)
        isolated, unlinked = self.isolation == 0, not self.input_gradients
        lines = [
            ("isolation", "change of a document when others are replaced", self.isolation, "0", isolated),
            ("", "gradient of a document without a loss of its own", self.input_gradients, "0", unlinked),
            ("parity", "worst layer, packed against alone", self.parity, forward, self.has_parity),
            ("", "mean loss under the collator's labels", self.loss, f"{_SAME_LOSS:.0e}", self.has_loss),
            ("gradients", "worst parameter, packed against alone", self.gradients, gradients, self.has_gradients),
            ("control", "isolation without boundaries: must show", self.control, f"> {_VISIBLE:.0e}", self.has_power),
        ]
        if (pads := self.unpadding) is not None:
            against, allowed = f"padded batches without pads, against {pads.against}", f"{pads.allowed:.1e}"
            without = pads.verdict == "exact"
            lines.append(("unpadding", against, pads.difference, allowed, without))
            by, limit = pads.gradients, _number(pads.gradients_allowed)
            lines.append(("", "worst parameter, with pads against without", by, limit, without))
            if (shared := pads.sharing) is not None:
                allowed, limit, same = f"{shared.allowed:.1e}", _number(shared.gradients_allowed), pads.is_exact
                lines.append(("sharing", "prefixes once, against in each row", shared.difference, allowed, same))
                lines.append(("", "worst parameter, once against in each", shared.gradients, limit, same))
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
            f"{self.verdict}: isolation {max(self.isolation, self.input_gradients or 0.0):.1e}, "
            f"parity {self.parity:.1e} (allowed {self.threshold:.1e}), "
            f"gradients {gradients}, "
            f"without boundaries {self.control:.1e} "
            f"[{self.model_type}, level {self.level}, {self.backend}, {self.dtype}, {self.training}]"
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
        do = (
            "Train padded with packing=False, or with another attention_backend (trl-packfa backends lists them), "
            "and please report it. check_packing=False trains without this proof."
        )
        if self.verdict == "no power":
            do = (
                "A model from scratch: give matrices that are zero small random values (torch.nn.init.normal_ with "
                "std=1e-3) before it is patched, or train its first steps padded with packing=False. "
                "check_packing=False trains without this proof."
            )
        raise ContaminationError(f"packing is not exact on this model: {self}", why=reasons, do=do)

    def _reasons(self) -> list[str]:
        if self.verdict == "not finite":
            return [f"the model's own logits are not finite in {self.dtype}, for documents alone: nothing can be told"]
        if self.verdict == "no power":
            why = ["removing the boundaries changed nothing: this model mixes no tokens, or its weights are zero"]
            return [*why, f"matrices of zeros: {self.no_weight}"] if self.no_weight else why
        if self.verdict == "leak" and self.isolation:
            return [f"replacing some documents changed others; first in module '{self.first_leak}'"]
        if self.verdict == "leak":
            return ["the gradient of one document's loss reaches the embeddings of others"]
        reasons: list[str] = []
        if self.unpadding is not None and self.unpadding.verdict != "exact":
            reasons.append(f"padded batches without their pads: {self.unpadding}")
        elif self.unpadding is not None and not self.unpadding.is_exact:
            reasons.append(f"rows that share what they begin with: {self.unpadding.sharing}")
        if not self.has_parity:
            where = f"; first in module '{self.first_difference}'" if self.first_difference else ""
            reasons.append(f"a packed document differs from the same document alone{where}")
        if self.has_parity and not self.has_loss:
            reasons.append("the collator's labels do not make the documents' own loss: a boundary is not masked")
        if not self.has_gradients:
            reasons.append(
                f"the packed gradient is not the sum of the documents' own; worst in parameter '{self.first_gradient}'"
            )
        return reasons


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
