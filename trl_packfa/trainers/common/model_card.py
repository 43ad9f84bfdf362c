"""Section of a model card about packing: strategy, counts of the data, the exactness check, versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...exactness import ExactnessReport
from ...packing import PackingReport
from ...versions import MINIMUM_VERSIONS, installed_version

_HEADING = "## Packing\n"
# The heading that follows the training procedure in TRL's template.
_BEFORE = "\n## Citations"


def packing_section(
    settings: Mapping[str, object],
    reports: Mapping[str, PackingReport],
    exactness: ExactnessReport | None,
    *,
    said: str = "",
) -> str:
    """Write the section in Markdown: settings, counts of the data, the proof, and versions.

    It also says if nothing was checked. `said` is the proof of a run that has no report.
    """
    shown = {name: f'"{value}"' if isinstance(value, str) else value for name, value in settings.items()}
    told = ", ".join(f"`{name}={value}`" for name, value in shown.items())
    versions = exactness.versions if exactness is not None else _installed_versions()
    lines = [
        _HEADING,
        f"Trained with [trl-packfa](https://arxiv.org/abs/2407.09105): {told}.",
        "",
        *(f"- Data, {name}: " + ", ".join(f"{label} {value}" for label, value in report.lines()) + "."
          for name, report in reports.items()),
        f"- Exactness: {said or _proof(exactness)}",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + ".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# TRL's template writes this for a model without a name on the Hub.
_NAMELESS = "[None](https://huggingface.co/None)"


def name_base(folder: str | Path | None, base: str) -> None:
    """Replace the names that TRL wrote as None into the model card.

    These are the base model, if it is a local folder, and the run's folder, if it is not pushed to the Hub.
    """
    path = Path(folder or ".") / "README.md"
    text = path.read_text(encoding="utf-8")
    local = f"`{Path(base).name}`, a local folder" if base else "a model without a name"
    named = text.replace(_NAMELESS, local).replace('model="None"', f'model="{Path(folder or ".").name}"')
    if named != text:
        path.write_text(named, encoding="utf-8")


def copy_card(folder: str | Path | None, checkpoint: Path) -> None:
    """Copy a run's card over the empty template that PEFT writes next to an adapter."""
    card, empty = Path(folder or ".") / "README.md", checkpoint / "README.md"
    if card.exists() and empty.exists():
        empty.write_text(card.read_text(encoding="utf-8"), encoding="utf-8")


def add_section(folder: str | Path | None, section: str) -> None:
    """Insert the section into TRL's model card in a folder, before the citations; replace an existing one."""
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


def _installed_versions() -> dict[str, str | None]:
    return {name: installed_version(name) for name in ("trl-packfa", *MINIMUM_VERSIONS)}
