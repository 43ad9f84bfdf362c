"""A comparison of two runs: how far apart they are, and how far they may be; and what each kind of comparison shows.

Everything that the library verifies about a run is a [`Comparison`], and each kind has its words in [`KINDS`].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .errors import ContaminationError

# A control must differ by more than this. Else the model mixes no tokens, and a comparison has no power.
VISIBLE = 1e-4
# A difference may be this many times the measured rounding.
NOISE_FACTOR = 4.0


class Tolerance(NamedTuple):
    """Differences that are always allowed in a dtype."""

    # Relative, of outputs. In float32 packed and padded runs of 181 architectures differ by less than a third of it,
    # and faults by more than a hundred times as much. In half precision it is two last places.
    outputs: float
    # Relative, of gradients of matrices: they are products, which are summed in float32.
    gradients: float
    # Relative, of gradients of norms and biases: they are sums over tokens, and torch's kernels sum them in half
    # precision: over 570 tokens they are off by up to a sixth.
    vectors: float
    log_probs: float  # in nats: two last places of a logit of eight
    losses: float  # of two means over the same losses, as a share of the mean, or of 1 if that is more
    # The largest, in standard deviations, between two kernels of one module: they round differently on other shapes.
    kernels: float


TOLERANCES = {
    torch.float64: Tolerance(1e-4, 3e-4, 3e-4, 1e-3, 1e-5, 1e-6),
    torch.float32: Tolerance(1e-4, 3e-4, 3e-4, 1e-3, 1e-4, 1e-3),
    torch.float16: Tolerance(4e-3, 3e-2, 0.25, 1.6e-2, 2e-2, 5e-2),
    torch.bfloat16: Tolerance(1.6e-2, 1e-1, 0.25, 1.25e-1, 2e-2, 5e-2),
}


class Kind(NamedTuple):
    """The words of a kind of comparison. `{of}` and `{where}` stand for the comparison's."""

    what: str  # what was measured
    why: str  # what it means if the comparison does not hold
    label: str = ""  # short name in a line of text; empty: shown only if it does not hold
    row: str = ""  # heading of its row in a table; empty: that of the row above
    verdict: str = "differs"  # if it does not hold
    fails: str = ""  # what is not exact, where a comparison is required by itself
    do: str = "Train padded with packing=False, and please report it. check_packing=False trains without this check."
    is_control: bool = False  # it must differ visibly
    is_of_batch: bool = False  # it compares a run's own batch, so another run has its own


# By name, in the order in which they decide a verdict: numbers that are not finite make every other measurement
# meaningless, and a check that misses the control's leak cannot prove that there is none.
KINDS = {
    "finite": Kind(
        "logits of documents alone that are not finite",
        "the model's own logits are not finite in {of}, even for documents alone",
        row="finite", verdict="not finite",
    ),
    "isolation": Kind(
        "change of a document when others are replaced",
        "replacing some documents changed others; first in module '{where}'",
        label="isolation", row="isolation", verdict="leak",
    ),
    "steadiness": Kind(
        "change between runs of the same tokens",
        "runs of the same tokens differ by up to {of}: the device's kernels are not steady",
        label="equal runs differ by",
    ),
    "control": Kind(
        "isolation without boundaries: not 0",
        "removing the boundaries changed nothing: this model mixes no tokens, or its weights are zero{where}",
        label="without boundaries", row="control", verdict="no power", is_control=True,
    ),
    "input gradients": Kind(
        "gradient of a document without a loss of its own",
        "the gradient of one document's loss reaches the embeddings of others",
        verdict="leak",
    ),
    "unpadding control": Kind(
        "pads left visible: not 0",
        "making pads visible changes nothing: this model mixes no tokens, or its weights are zero",
        label="pads left visible", row="control", verdict="no power", is_control=True,
    ),
    "sharing control": Kind(
        "branches that see each other: not 0",
        "letting a branch see another changes nothing: this model mixes no tokens",
        label="branches that see each other", is_control=True,
    ),
    "parity": Kind(
        "worst layer, packed against alone",
        "a packed document differs from the same document alone; first in module '{where}'",
        label="parity", row="parity",
    ),
    "labels": Kind(
        "collator's labels that are not the next token",
        "the collator's labels are not each document's own next tokens: a boundary is not masked",
    ),
    "gradients": Kind(
        "worst parameter, packed against alone",
        "the packed gradient is not the sum of the documents' own; worst in parameter '{where}'",
        label="gradients", row="gradients",
    ),
    "unpadding": Kind(
        "padded batches without pads, against {of}",
        "padded batches without their pads differ; first in module '{where}'",
        label="without pads against {of}", row="unpadding",
    ),
    "unpadding gradients": Kind(
        "worst parameter, with pads against without",
        "padded batches without their pads differ; worst in the gradient of '{where}'",
        label="gradients",
    ),
    "pads seen": Kind(
        "the model's own padded rows, against alone",
        "positions or states of this model's own padded rows run through the pads",
        label="its own padded rows are from their documents alone by",
    ),
    "pads counted": Kind(
        "left-padded rows whose positions count pads",
        "positions count from each row's first token, not from its pads on",
        label="left-padded rows whose positions count from the pads on differ by",
    ),
    "sharing": Kind(
        "prefixes once, against in each row",
        "rows that share a prefix differ; first in module '{where}'",
        label="prefixes once against in each row", row="sharing",
    ),
    "sharing gradients": Kind(
        "worst parameter, once against in each",
        "rows that share a prefix differ; worst in the gradient of '{where}'",
        label="gradients",
    ),
    "shared row": Kind(
        "log-probabilities of a row on {of} processes",
        "some module of this model needs tokens of the row that other processes hold",
        row="shared row", fails="rows that {of} processes share are not exact on this model: log-probabilities",
        do="Train it with sequence_parallel=1, and please report it. check_packing=False trains without this check.",
    ),
    "shared row gradients": Kind(
        "worst parameter of a row on {of} processes",
        "some module of this model needs tokens of the row that other processes hold",
        fails="rows that {of} processes share are not exact on this model: the gradient of {where}",
        do="Train it with sequence_parallel=1, and please report it. check_packing=False trains without this check.",
    ),
    "first batch": Kind(
        "log-probabilities of the first batch, {of}",
        "the earlier check, on documents cut out of the data, found packing exact: so something in these documents, "
        "or in the collator's arguments for them, acts across boundaries",
        row="first batch", is_of_batch=True,
        fails="packing is not exact on the first training batch: the log-probability of the median token of {of}",
    ),
    "head": Kind(
        "LM head that trains: {of}",
        "the head scores trained positions with its own forward and backward; they differ from the model's own logits "
        "with torch's cross-entropy",
        is_of_batch=True, fails="the LM head that trains is not exact on the first training batch: {of}",
        do="Please report it. check_packing=False trains without this check.",
    ),
    "padded batch": Kind(
        "first batch without its pads, {of}",
        "patch(model, unpad=True) found rows without pads exact, so something in this batch, or something that the "
        "trainer passes with it, has an effect across rows",
        is_of_batch=True, fails="{where}: the first batch without its pads is not exact: the typical token of {of}",
        do="Train padded, without padding_free or with packing=False, and please report it.",
    ),
    "own loss": Kind("loss of two documents by a user's function", "its loss of two documents is {of}"),
    "re-cut loss": Kind(
        "loss of the first micro-batch, {of}",
        "this loss is not a mean over pairs, so re-cut steps would train another loss",
        is_of_batch=True,
        fails="{where}: the loss of the first micro-batch, {of} as the mean of its halves' losses,",
        do="Train with packing_strategy='minibatch', and please report it.",
    ),
    "merged images": Kind("values of a batch", "the processor's batches depend on their examples: {where}"),
    "images": Kind(
        "losses of an example in the first re-cut micro-batch of {of}, against alone",
        "the model, or its processor, lets the images of a micro-batch have an effect on each other",
        is_of_batch=True,
        fails="the first re-cut micro-batch is not exact: the loss of one of its {of} examples, against the example "
        "alone,",
        do="Train with packing_strategy='minibatch', which keeps the padded run's micro-batches, and report it.",
    ),
}  # fmt: skip


class Comparison(NamedTuple):
    """The difference between two runs, by default relative, and its limit, which a control must exceed."""

    kind: str  # name of one of [`KINDS`]
    difference: float
    allowed: float  # 0: not one bit; infinite: only a figure
    where: str = ""  # the module or parameter that is worst, or the first one that is wrong
    noise: float = 0.0  # the difference from rounding alone
    of: str = ""  # which part of the run was compared

    @classmethod
    def beside_rounding(
        cls, kind: str, difference: float, noise: float, least: float, *, factor: float = NOISE_FACTOR, **fields: Any
    ) -> Comparison:
        """Return a comparison whose limit is some times what rounding changes, and at `least` this much.

        If either number is not finite, no noise is allowed, and any difference is infinite.
        """
        if not math.isfinite(difference + noise):
            difference, noise = math.inf if difference else 0.0, 0.0
        return cls(kind, difference, max(factor * noise, least), noise=noise, **fields)

    @classmethod
    def of_means(cls, kind: str, mean: float, expected: float, dtype: torch.dtype, **fields: Any) -> Comparison:
        """Return a comparison of two means over the same losses, as a share of the expected one, or of 1."""
        return cls(kind, abs(mean - expected) / max(abs(expected), 1.0), TOLERANCES[dtype].losses, **fields)

    @property
    def words(self) -> Kind:
        """The words of its kind."""
        return KINDS[self.kind]

    @property
    def excess(self) -> float:
        """The difference as a share of its limit."""
        return self.difference / self.allowed

    @property
    def holds(self) -> bool:
        """True if the difference is within its limit, or, of a control, beyond it. NaN is neither."""
        return self.difference > self.allowed if self.words.is_control else self.difference <= self.allowed

    @property
    def is_figure(self) -> bool:
        """True if it has no limit: it only helps to understand the others."""
        return math.isinf(self.allowed)

    @property
    def why(self) -> str:
        """Reason that an error gives if the comparison does not hold."""
        return self._filled(self.words.why)

    def require(self) -> None:
        """Raise [`ContaminationError`] with the numbers unless the comparison holds."""
        if not self.holds:
            raise ContaminationError(
                f"{self._filled(self.words.fails)} is off by {self.difference:.2e} (allowed {self.allowed:.2e}).",
                why=[self.why],
                do=self.words.do,
            )

    def row(self) -> dict[str, str]:
        """Return the row of a table for the terminal."""
        allowed = "rounding" if self.is_figure else f"{self.allowed:.1e}" if self.allowed else "0"
        if self.words.is_control:
            allowed = f"> {self.allowed:.0e}"
        return {
            "verdict": self.words.row,
            "what": self._filled(self.words.what),
            "measured": f"{self.difference:.1e}",
            "allowed": allowed,
            "": "yes" if self.holds else "NO",
        }

    def __str__(self) -> str:
        name = self._filled(self.words.label or self.words.what)
        has_limit = self.allowed and not self.words.is_control and not self.is_figure
        return f"{name} {self.difference:.1e}" + (f" (allowed {self.allowed:.1e})" if has_limit else "")

    def _filled(self, text: str) -> str:
        return text.format(of=self.of, where=self.where)


def nearest(found: Iterable[Comparison]) -> Comparison:
    """Return the comparison that is nearest to its limit, or farthest beyond it."""
    return max(found, key=lambda comparison: comparison.excess)
