"""The table of model types: which level serves each, as lines and as the documentation's page has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..patches.registry import registered_patches


def rows(types: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line for each type: what unpatched TRL comes to, and the level on a CPU and on CUDA; then what third parties
    registered."""
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
    """The documentation's support table: levels, what they do, and their types."""
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
