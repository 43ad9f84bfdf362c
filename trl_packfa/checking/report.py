"""The report of the check: what was verified, by how far it was off, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..comparison import KINDS, Comparison
from ..errors import ContaminationError
from ..patches.measured import results

_NEW_MODEL = (
    "If the model is new, fill its matrices of zeros with small random values (torch.nn.init.normal_ with std=1e-3) "
    "before patching, or train its first steps padded."
)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of the check: what was verified about a run, and the verdict.

    `report["parity"]` is one comparison: its `difference`, the difference `allowed`, `where` it is, and the `noise` of
    rounding alone. There are

    - `isolation`: the largest change of any document's logits when others are replaced, in standard deviations of the
      logits. Must be 0. With experts, the rest of the change if every layer gets the same input; `noise` is the whole:
      other tokens change which tokens are multiplied together, and so how sums are rounded.
    - `steadiness`: the largest change between repeated runs of the same tokens, where a document changed: some kernels
      give other bits in each run. Up to the size of rounding this is allowed, and a smaller leak is not seen.
    - `input gradients`: the largest gradient of the embeddings of documents without a loss, in standard deviations of
      the gradient of documents with a loss. Must be 0. Not measured if the backbone embeds each document by itself.
    - `parity`: the largest relative difference between the output of a layer, token mixer or LM head for a packed
      document, in one row or in several, and for the same document alone, with the same input.
    - `labels`: the share of the collator's labels that are not the document's own next token. Must be 0.
    - `gradients`: between the packed gradient of a trained parameter and the sum of the documents' own. Not measured
      if nothing trains.
    - `control`: isolation with the boundaries removed. A check that does not see this change has no power.
    - for a model patched with `unpad=True`, `unpadding`: padded rows without their pads, against the model's own, or
      against documents alone if those see their pads, which `pads seen` measures; `unpadding gradients` if something
      trains; `unpadding control`, with the pads left visible; `pads counted`, of left-padded rows whose positions
      count from the pads on, as the model counts without `position_ids`. With `share_prefixes=True`, if the model can
      share, `sharing`, `sharing gradients` and `sharing control`;
    - once training has begun: `first batch`, between the log-probability of the median token of a document of the
      first batch, packed, and alone, in nats; `head`, between the LM head that trains and the model's own logits; and
      under `sequence_parallel` `shared row` and `shared row gradients`, between a row that several processes share and
      the same row on one process.

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
        bidirectional (`bool`), takes_left (`bool`):
            Of padded rows: whether tokens saw each other in both directions, as those of an image do, and whether rows
            padded on the left run without their pads, too. Pooling that reads the first column of a row reads a pad
            there: then such rows run with their pads, as without a patch.
        seconds (`float`):
            Duration of the check.
        identity (`str`):
            Hash of everything that was checked; a resumed run compares it with its own. Empty without a trainer.
        taken_from (`str`):
            Where an earlier check was taken from, a checkpoint or this machine's cache; empty if the check is new.
        versions (`dict[str, str]`):
            Versions of the libraries.
    """

    rows: tuple[Comparison, ...]
    dtype: str
    model_type: str = ""
    level: str = ""
    backend: str = ""
    training: str = ""
    mode: str = ""
    tokens: str = ""
    lengths: tuple[int, ...] = ()
    layers: str = ""
    bidirectional: bool = False
    takes_left: bool = True
    seed: int = 0
    seconds: float = 0.0
    identity: str = ""
    taken_from: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Comparison:
        """Return the comparison of this kind; raise `KeyError` if it was not made."""
        found = next((row for row in self.rows if row.kind == kind), None)
        if found is None:
            raise KeyError(f"'{kind}' was not compared, only {', '.join(row.kind for row in self.rows)}.")
        return found

    def __contains__(self, kind: str) -> bool:
        """Tell whether a comparison of this kind was made."""
        return any(row.kind == kind for row in self.rows)

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that do not hold; the first one decides the verdict."""
        failed = [row for row in self.rows if not row.holds]
        return sorted(failed, key=lambda row: list(KINDS).index(row.kind))

    @property
    def verdict(self) -> str:
        """The verdict: `exact`, `leak`, `differs`, `no power` or `not finite`."""
        return self.failed[0].words.verdict if self.failed else "exact"

    @property
    def is_exact(self) -> bool:
        """True if every comparison holds, and a control shows that it could have failed."""
        return not self.failed

    def with_rows(self, rows: Iterable[Comparison]) -> Any:
        """Return the report with more comparisons; of a kind that it has, the new one."""
        new = {row.kind: row for row in rows}
        kept = [new.pop(row.kind, row) for row in self.rows]
        return replace(self, rows=(*kept, *new.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON, with the verdict."""
        facts = {own.name: getattr(self, own.name) for own in fields(self)}
        rows = [{**row._asdict(), "what": row.row()["what"], "holds": row.holds} for row in self.rows]
        return {"verdict": self.verdict, **facts, "rows": rows}

    def table(self) -> list[dict[str, str]]:
        """Return the rows of a table for the terminal: each measurement with its limit."""
        return [row.row() for row in self.rows]

    def __str__(self) -> str:
        shown = [str(row) for row in self.rows if row.words.label or not row.holds]
        if self._is_of_packing and "gradients" not in self:
            shown.append("gradients not measured, nothing trains")
        if self.bidirectional:
            shown.append("with tokens that see each other in both directions, as those of an image do")
        level = self.level and f"level {self.level}"
        facts = filter(None, (self.model_type, level, self.backend, self.dtype, self.training))
        return f"{self.verdict}: {', '.join(shown)} [{', '.join(facts)}]"

    @property
    def headline(self) -> str:
        """The verdict for the terminal, with where it was taken from or how long it took."""
        old = f"checked {self.taken_from}; nothing has changed since"
        return f"check: {self.verdict}, {old if self.taken_from else f'in {self.seconds:.0f} s'}"

    @property
    def _is_of_packing(self) -> bool:
        return "parity" in self

    def require_exact(self) -> None:
        """Raise [`ContaminationError`] unless the verdict is `exact`, with the numbers and the first wrong module."""
        if self.is_exact:
            return
        why = [row.why for row in self.failed if row.words.verdict == self.verdict]
        why += [row.why for row in self.rows if row.is_figure]
        if self._is_of_packing:
            what, known = "packing is", results().get(self.model_type, {})
            if known.get("unpatched") not in (None, "exact"):
                why.append(
                    f"unpatched, {self.model_type} {known['unpatched']} under TRL's keys; its patch: {known['why']}"
                )
            do = (
                "Train padded with packing=False, or with another attention_backend (trl-packfa env lists them), "
                "and please report it. check_packing=False trains without this check."
            )
        else:
            shares = all(row.kind.startswith("sharing") for row in self.failed)
            what = "rows that share a prefix are" if shares else "padded batches without their pads are"
            option = "share_prefixes" if shares else "unpad"
            do = f"Patch it with {option}=False, or with another backend, and please report it."
        do = f"{_NEW_MODEL} {do}" if self.verdict == "no power" else do
        raise ContaminationError(f"{what} not exact on this model: {self}", why=why, do=do)
