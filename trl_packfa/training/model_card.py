"""What a model card says about packing: strategy, what became of the data, the proof, versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..exactness import ExactnessReport
from ..packing import PackingReport
from ..versions import MINIMUM_VERSIONS, installed_version
from .config import PackedSFTConfig

_HEADING = "## Packing\n"
# TRL's template has it after the training procedure.
_BEFORE = "\n## Citations"


def packing_section(
    args: PackedSFTConfig, reports: Mapping[str, PackingReport], exactness: ExactnessReport | None
) -> str:
    """The section in Markdown; says so where nothing was proven."""
    settings = (
        f'`packing_strategy="{args.packing_strategy}"`, `max_length={args.max_length}`, `overflow="{args.overflow}"`, '
        f'`loss_weighting="{args.loss_weighting}"`'
    )
    return card_section(settings, reports, _proof(exactness), versions=exactness.versions if exactness else None)


def card_section(
    settings: str, reports: Mapping[str, PackingReport], proof: str, *, versions: Mapping[str, str] | None = None
) -> str:
    """The section of any trainer: its settings, what became of the data, what was proven, and under which versions,
    those that are installed if none are given."""
    lines = [
        _HEADING,
        f"Trained with [trl-packfa](https://arxiv.org/abs/2407.09105): {settings}.",
        "",
        *(f"- Data, {name}: " + ", ".join(f"{label} {value}" for label, value in report.lines()) + "."
          for name, report in reports.items()),
        f"- Exactness: {proof}",
        f"- Versions: {_versions(versions)}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# What TRL's template makes of a model that is no name on the Hub.
_NAMELESS = "[None](https://huggingface.co/None)"


def name_base(folder: str | Path | None, base: str) -> None:
    """Name what TRL calls None in the card that it wrote: the base model, if it is a local folder, and the folder of
    the run, if it is not pushed to the Hub."""
    path = Path(folder or ".") / "README.md"
    text = path.read_text(encoding="utf-8")
    local = f"`{Path(base).name}`, a local folder" if base else "a model without a name"
    named = text.replace(_NAMELESS, local).replace('model="None"', f'model="{Path(folder or ".").name}"')
    if named != text:
        path.write_text(named, encoding="utf-8")


def copy_card(folder: str | Path | None, checkpoint: Path) -> None:
    """A run's card in the place of the empty template that PEFT writes beside an adapter."""
    card, empty = Path(folder or ".") / "README.md", checkpoint / "README.md"
    if card.exists() and empty.exists():
        empty.write_text(card.read_text(encoding="utf-8"), encoding="utf-8")


def add_section(folder: str | Path | None, section: str) -> None:
    """Put the section into the model card that TRL wrote into a folder, before its citations; one that is there
    already is replaced."""
    path = Path(folder or ".") / "README.md"
    text = path.read_text(encoding="utf-8")
    if _HEADING in text:
        before, rest = text.split(_HEADING, 1)
        text = before.rstrip("\n") + "\n" + rest[rest.index(_BEFORE) :] if _BEFORE in rest else before
    at = text.find(_BEFORE)
    before, after = (text, "") if at < 0 else (text[:at], text[at:])
    path.write_text(f"{before.rstrip()}\n\n{section}{after}", encoding="utf-8")


def _proof(exactness: ExactnessReport | None) -> str:
    if exactness is None:
        return "not checked before training (`check_packing=False`)."
    gradients = "" if exactness.gradients is None else f", gradients {exactness.gradients:.1e}"
    return (
        f"verdict `{exactness.verdict}` before the first step (isolation {exactness.isolation:.1e}, parity "
        f"{exactness.parity:.1e}{gradients}; without boundaries {exactness.control:.1e}); model type "
        f"`{exactness.model_type}`, level `{exactness.level}`, attention backend `{exactness.backend}`, "
        f"{exactness.dtype}, {exactness.training}, seed {exactness.seed}."
    )


def _versions(known: Mapping[str, str] | None) -> str:
    versions = known or {name: installed_version(name) for name in ("trl-packfa", *MINIMUM_VERSIONS)}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
