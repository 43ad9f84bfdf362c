"""The report of the check: measurements and verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import ContaminationError
from ..patches.measured import results
from .unpadding_report import Line, UnpaddingReport, number, table_rows

# Removing the boundaries must move documents by more than this. Else the model mixes no tokens, and the check has no
# power.
_VISIBLE = 1e-4
# Limit for the difference between two sums of the same losses.
_SAME_LOSS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ExactnessReport:
    """Result of the check: measurements and verdict.

    Args:
        model_type (`str`), level (`str`), backend (`str`), dtype (`str`):
            The model type, the patch's level, the attention backend and the dtype that were checked.
        training (`str`), mode (`str`), tokens (`str`):
            How the model trains: adapter, quantization, gradient checkpointing. The measured mode: training,
            evaluation, or both if they differ. Whether the model knows the documents' tokens.
        lengths (`tuple[int, ...]`), seed (`int`):
            Lengths of the documents in tokens, and the seed of the random numbers.
        layers (`str`):
            How many layers ran the many arrangements of documents, out of the model's layers.
        isolation (`float`):
            Largest change of any document's logits when others are replaced, in standard deviations of the logits.
            Must be 0. With experts, the rest of the change if every layer gets the same input.
        regrouped (`float`):
            With experts, the whole change: other tokens change which tokens are multiplied together, and so how sums
            are rounded.
        unsteady (`float`):
            Largest change between repeated runs of the same tokens, measured where a document changed: some kernels
            give other bits in each run. Up to the size of rounding this is allowed, and a smaller leak is not seen.
        input_gradients (`float` or `None`):
            Largest gradient of the embeddings of documents without a loss, in standard deviations of the gradient of
            documents with a loss. Must be 0. `None` if the backbone embeds each document by itself.
        parity (`float`), threshold (`float`), noise (`float`):
            Largest relative difference between the output of a layer, token mixer or LM head for a packed document, in
            one row or in several, and for the same document alone, with the same input; its limit; and the difference
            from rounding alone, with every value changed by up to a last place.
        loss (`float`):
            Difference between the mean losses under the collator's labels and under each document's own next tokens.
        gradients (`float` or `None`), gradient_threshold (`float` or `None`), gradient_noise (`float` or `None`):
            Worst relative difference between the packed gradient of a trained parameter and the sum of the documents'
            own gradients, its limit, and the difference from rounding alone. `None` if nothing trains.
        control (`float`):
            Isolation with the boundaries removed. A check that does not see this change has no power.
        first_leak (`str` or `None`), first_difference (`str` or `None`), first_gradient (`str` or `None`):
            First module whose output changes with another document; first module that differs from the document alone;
            parameter with the worst gradient.
        is_finite (`bool`):
            Whether the logits of the documents alone are finite.
        first_batch (`float` or `None`), first_batch_allowed (`float` or `None`):
            Difference between the trainer's first batch, packed, and some of its documents alone, known once training
            has begun: of the log-probability of the median token of the worst document, in nats; and its limit.
        head (`float` or `None`), head_allowed (`float` or `None`):
            Worst difference of the LM head that trains, on that batch, from the model's own logits; and its limit.
        sharded_row, sharded_row_allowed, sharded_row_gradients (`float` or `None`):
            Under `sequence_parallel`, once training has begun: difference between a row that several processes share
            and the same row on one process, in nats; its limit; and the worst relative difference of a parameter's
            gradient.
        no_weight (`str`):
            Matrices of zeros, which may hide a leak from the control.
        unpadding ([`UnpaddingReport`] or `None`):
            Padded batches with and without their pads, for a model patched with `unpad=True`.
        seconds (`float`):
            Duration of the check.
        identity (`str`):
            Hash of everything that was proven; a resumed run compares it with its own. Empty without a trainer.
        taken_from (`str`):
            Where an earlier proof was taken from, a checkpoint or this machine's cache; empty if the proof is new.
        versions (`dict[str, str]`):
            Versions of the libraries.
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
    unsteady: float = 0.0
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
    sharded_row: float | None = None
    sharded_row_allowed: float | None = None
    sharded_row_gradients: float | None = None
    no_weight: str = ""
    unpadding: UnpaddingReport | None = None
    seconds: float = 0.0
    identity: str = ""
    taken_from: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def is_isolated(self) -> bool:
        """True if no document saw another, forwards or backwards."""
        return self.isolation == 0 and not self.input_gradients

    @property
    def has_power(self) -> bool:
        """True if the control leaked, as it must."""
        return self.control > _VISIBLE

    @property
    def has_parity(self) -> bool:
        """True if the packed outputs equal those of the documents alone."""
        return self.parity <= self.threshold

    @property
    def has_loss(self) -> bool:
        """True if the packed labels give the loss of the documents alone."""
        return self.loss <= _SAME_LOSS

    @property
    def has_gradients(self) -> bool:
        """True if the packed gradient is the sum of the documents' own."""
        return self.gradients is None or self.gradients <= (self.gradient_threshold or 0.0)

    @property
    def is_exact(self) -> bool:
        """True if documents are isolated and equal to themselves alone, shown by a test that could have failed."""
        return self.verdict == "exact"

    @property
    def verdict(self) -> str:
        """The verdict: `exact`, `leak`, `differs`, `no power` or `not finite`."""
        # This comes first: numbers that are not finite make every other measurement meaningless.
        if not self.is_finite:
            return "not finite"
        # This comes before parity: a check that misses the control's leak cannot prove that there is none.
        if not self.has_power:
            return "no power" if self.isolation == 0 else "leak"
        if not self.is_isolated:
            return "leak"
        unpadded = self.unpadding is None or self.unpadding.is_exact
        return "exact" if self.has_parity and self.has_loss and self.has_gradients and unpadded else "differs"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON, with the verdict."""
        return {"verdict": self.verdict, **asdict(self)}

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of a table for the terminal: each measurement with its limit."""
        forward, gradients = f"{self.threshold:.1e}", number(self.gradient_threshold)
        isolated, unlinked, visible = self.isolation == 0, not self.input_gradients, f"> {_VISIBLE:.0e}"
        lines: list[Line] = [
            ("isolation", "change of a document when others are replaced", self.isolation, "0", isolated),
            ("", "change between runs of the same tokens", self.unsteady or None, "rounding", True),
            ("", "gradient of a document without a loss of its own", self.input_gradients, "0", unlinked),
            ("parity", "worst layer, packed against alone", self.parity, forward, self.has_parity),
            ("", "mean loss under the collator's labels", self.loss, f"{_SAME_LOSS:.0e}", self.has_loss),
            ("gradients", "worst parameter, packed against alone", self.gradients, gradients, self.has_gradients),
            ("control", "isolation without boundaries: not 0", self.control, visible, self.has_power),
        ]
        return table_rows([*lines, *(self.unpadding.measurements() if self.unpadding is not None else ())])

    def __str__(self) -> str:
        unsteady = f" (equal runs differ by {self.unsteady:.1e})" if self.unsteady else ""
        gradients = "not measured, nothing trains"
        if self.gradients is not None:
            gradients = f"{self.gradients:.1e} (allowed {number(self.gradient_threshold)})"
        return (
            f"{self.verdict}: isolation {max(self.isolation, self.input_gradients or 0.0):.1e}{unsteady}, "
            f"parity {self.parity:.1e} (allowed {self.threshold:.1e}), "
            f"gradients {gradients}, "
            f"without boundaries {self.control:.1e} "
            f"[{self.model_type}, level {self.level}, {self.backend}, {self.dtype}, {self.training}]"
        )

    def require_exact(self) -> None:
        """Raise [`ContaminationError`] unless the verdict is `exact`, with the numbers and the first wrong module."""
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
                "If the model is new, fill its matrices of zeros with small random values (torch.nn.init.normal_ with "
                "std=1e-3) before patching, or train its first steps padded with packing=False. "
                "check_packing=False trains without this proof."
            )
        raise ContaminationError(f"packing is not exact on this model: {self}", why=reasons, do=do)

    def _reasons(self) -> list[str]:
        if self.verdict == "not finite":
            return [f"the model's own logits are not finite in {self.dtype}, even for documents alone"]
        if self.verdict == "no power":
            why = ["removing the boundaries changed nothing: this model mixes no tokens, or its weights are zero"]
            return [*why, f"matrices of zeros: {self.no_weight}"] if self.no_weight else why
        if self.verdict == "leak" and self.isolation:
            why = [f"replacing some documents changed others; first in module '{self.first_leak}'"]
            varied = (
                f"runs of the same tokens differ by up to {self.unsteady:.1e}: the device's kernels are not steady"
            )
            return [*why, varied] if self.unsteady else why
        if self.verdict == "leak":
            return ["the gradient of one document's loss reaches the embeddings of others"]
        reasons: list[str] = []
        if self.unpadding is not None and self.unpadding.verdict != "exact":
            reasons.append(f"padded batches without their pads: {self.unpadding}")
        elif self.unpadding is not None and not self.unpadding.is_exact:
            reasons.append(f"rows that share a prefix: {self.unpadding.sharing}")
        if not self.has_parity:
            where = f"; first in module '{self.first_difference}'" if self.first_difference else ""
            reasons.append(f"a packed document differs from the same document alone{where}")
        if self.has_parity and not self.has_loss:
            reasons.append("the collator's labels do not give the documents' own loss: a boundary is not masked")
        if not self.has_gradients:
            reasons.append(
                f"the packed gradient is not the sum of the documents' own; worst in parameter '{self.first_gradient}'"
            )
        return reasons
