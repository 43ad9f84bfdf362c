"""The section on packing and its check in TRL's model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...checking import CheckReport
from ...packing import PackingReport
from ...versions import MINIMUM_VERSIONS, installed_version

_HEADING = "## Packing\n"
_METHOD = "by the method of [arXiv 2407.09105](https://arxiv.org/abs/2407.09105)"
# The heading that follows the training procedure in TRL's template.
_BEFORE = "\n## Citations"


def packing_section(
    settings: Mapping[str, object],
    reports: Mapping[str, PackingReport],
    check_report: CheckReport | None,
    *,
    said: str = "",
) -> str:
    """Write the section in Markdown: settings, counts of the data, the check, and versions.

    It also says if nothing was checked. `said` is the check of a run that has no report.
    """
    shown = {name: f'"{value}"' if isinstance(value, str) else value for name, value in settings.items()}
    told = ", ".join(f"`{name}={value}`" for name, value in shown.items())
    installed = {name: installed_version(name) for name in ("trl-packfa", *MINIMUM_VERSIONS)}
    versions = check_report.versions if check_report is not None else installed
    lines = [
        _HEADING,
        f"Trained with [trl-packfa](https://github.com/trl-packfa/trl-packfa), {_METHOD}: {told}.",
        "",
        *(f"- Data, {name}: " + ", ".join(f"{label} {value}" for label, value in report.lines()) + "."
          for name, report in reports.items()),
        f"- Check: {said or _check(check_report)}",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + ".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def name_base(text: str, base: str, *, run: str) -> str:
    """Replace the names that TRL wrote as None into the card: of a local base, and of a run that is not pushed."""
    local = f"`{Path(base).name}`, a local folder" if base else "a model without a name"
    return text.replace("[None](https://huggingface.co/None)", local).replace('model="None"', f'model="{run}"')


def add_section(text: str, section: str) -> str:
    """Insert the section into the text of TRL's model card, before the citations; replace an existing one."""
    if _HEADING in text:
        before, rest = text.split(_HEADING, 1)
        text = before.rstrip("\n") + "\n" + rest[rest.index(_BEFORE) :] if _BEFORE in rest else before
    at = text.find(_BEFORE)
    before, after = (text, "") if at < 0 else (text[:at], text[at:])
    return f"{before.rstrip()}\n\n{section}{after}"


def _check(check_report: CheckReport | None) -> str:
    if check_report is None:
        return "not checked before training (`check_packing=False`)."
    rows = ", ".join(str(row) for row in check_report.rows if row.words.label)
    return (
        f"verdict `{check_report.verdict}` before the first step ({rows}); model type "
        f"`{check_report.model_type}`, level `{check_report.level}`, attention backend `{check_report.backend}`, "
        f"{check_report.dtype}, {check_report.training}, seed {check_report.seed}."
    )
