"""Table of the types with images or sounds, as rows for the terminal and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_FORM = "not tried"


def rows(types: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return one row for each type: the result without pads, and how far it is from the padded run."""
    return [
        {
            "model_type": name,
            "verdict": result["verdict"],
            "level": result.get("level", ""),
            "decoder": result.get("decoder", ""),
            "both directions": "yes" if result.get("blocks") else "",
            "images": result.get("images", ""),
            "logits": str(result.get("logits", "")),
            "gradients": str(result.get("gradients", "")),
            "why": result.get("why", ""),
        }
        for name, result in types.items()
    ]


def markdown(types: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the documentation: the types by result, and each refusal with its reason."""
    exact = {name: result for name, result in types.items() if result["verdict"] == "exact"}
    seen = [name for name, result in exact.items() if not result["images"].startswith(_FORM)]
    text = [name for name in exact if name not in seen]
    both = [name for name, result in exact.items() if result.get("blocks")]
    worst = {key: max(exact[name][key] for name in seen) for key in ("logits", "gradients")}
    lines = [
        "| result | types | which |",
        "|---|---|---|",
        f"| exact with images or sounds (logits off by {worst['logits']:.1e} at most, gradients by "
        f"{worst['gradients']:.1e}) | {len(seen)} | {_names(seen)} |",
        *(
            [f"| exact on text; images or sounds in a form that was not tried | {len(text)} | {_names(text)} |"]
            if text
            else []
        ),
        f"| of both, with image tokens that see each other in both directions | {len(both)} | {_names(both)} |",
    ]
    reasons: dict[str, list[str]] = {}
    for name, result in types.items():
        if result["verdict"] not in ("exact", "not built"):
            reasons.setdefault(result["why"].rstrip("."), []).append(name)
    unknown = [name for name, result in types.items() if result["verdict"] == "not built"]
    lines += ["", f"Refused with images, with the reason ({len(types) - len(exact) - len(unknown)}):", ""]
    lines += [f"- {_names(names)}: {why}." for why, names in reasons.items()]
    lines += [
        "",
        f"No small model could be built of these, so your own is checked ({len(unknown)}): {_names(unknown)}.",
    ]
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
