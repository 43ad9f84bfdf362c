"""Table of model types and their patch level, as rows for the terminal and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..patches.registry import registered_patches


def rows(types: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return one row for each model type: the result of unpatched TRL, and the level on a CPU and on CUDA.

    Patches that third parties registered come last.
    """
    lines = [
        {
            "model_type": name,
            "unpatched": result.get("unpatched", ""),
            "verdict": result["verdict"],
            "CPU": result.get("level", ""),
            "CUDA": result.get("level", ""),
            "CUDA with kernels": _WITH_KERNELS.get(result.get("level", ""), result.get("level", "")),
            "why": result["why"],
        }
        for name, result in types.items()
    ]
    others = {name: patch for name, patch in registered_patches().items() if patch.origin != "trl_packfa"}
    lines += [
        {**dict.fromkeys(lines[0], ""), "model_type": name, "CPU": patch.level, "why": f"patch from {patch.origin}"}
        for name, patch in others.items()
    ]
    return lines


_WITH_KERNELS = {"module": "native where proven, else module"}


def markdown(types: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the support table of the documentation: each level, what it runs, and its model types."""
    lines = ["| level | types | what runs | which |", "|---|---|---|---|"]
    for level, what in _LEVELS.items():
        names = [
            name for name, result in types.items() if result.get("level") == level and result["verdict"] == "exact"
        ]
        lines.append(f"| {level} | {len(names)} | {what} | {', '.join(f'`{name}`' for name in names)} |")
    refused = {name: result["why"] for name, result in types.items() if result["verdict"] != "exact"}
    lines += ["", f"Refused, with the reason ({len(refused)}):", ""]
    lines += [f"- `{name}`: {why}." for name, why in refused.items()]
    return "\n".join(lines)


_LEVELS = {
    "attention": "the attention forward is rewritten for packed tokens",
    "interface": "attention goes through transformers' attention and mask interfaces; position embeddings that count "
    "along the row, and sparse indexers, run by document",
    "module": "what mixes tokens beside or instead of attention runs by document, or on its own kernels where those "
    "provably honour boundaries; everything else is packed",
    "rebatch": "the whole backbone runs by document, in right-padded groups of similar lengths",
}
