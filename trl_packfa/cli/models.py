"""`trl-packfa models`: measured results of causal LMs, models with images, encoders, and PEFT's tuners."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..versions import installed_version
from .output import Commands, add_json, described, print_rows

# Heads of the encoders, and their words.
HEADS = {
    "SequenceClassification": "sequence classification",
    "TokenClassification": "token classification",
    "MaskedLM": "masked LM",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
    "Embeddings": "embeddings",
}
Row = dict[str, str]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = "list every causal-LM type of transformers with the measured result of packing"
    models = commands.add_parser("models", help=text)
    models.add_argument("--adapters", action="store_true", help="list PEFT's tuners instead of model types")
    models.add_argument("--images", action="store_true", help="list the types with images or sounds instead")
    models.add_argument("--encoders", action="store_true", help="list encoders by head instead")
    add_json(models)
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the measured results."""
    from ..adapters import table
    from ..patches import measured

    if args.adapters:
        rows, versions = _adapters(table.results()), table.measured_with()
    elif args.images:
        rows, versions = _composites(measured.composites()["types"]), measured.composites()["versions"]
    elif args.encoders:
        rows, versions = _encoders(measured.encoders()["types"]), measured.encoders()["versions"]
    else:
        rows, versions = _causal_lms(measured.results()), measured.measured_with()
    if not args.json:
        print(_measured(versions))
    return print_rows(rows, as_json=args.json)


def _adapters(kinds: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row for each kind: the differences of packed logits and gradients, and the reason of a refusal."""
    off = ("logits", "gradients")
    return [
        {"kind": kind, **_cells(row, "verdict"), **{name: number(row.get(name)) for name in off}, **_cells(row, "why")}
        for kind, row in kinds.items()
    ]


def number(value: float | None) -> str:
    """Return a difference as text."""
    return "does not run" if value is None else f"{value:.1e}"


def _cells(result: Mapping[str, Any], *columns: str) -> Row:
    return {column: str(result.get(column, "")) for column in columns}


def _composites(types: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row for each type: the result without pads, and how far it is from the padded run."""
    return [
        {
            "model_type": name,
            **_cells(result, "verdict", "level", "decoder"),
            "both directions": "yes" if result.get("bidirectional") else "",
            **_cells(result, "images", "logits", "gradients", "why"),
        }
        for name, result in types.items()
    ]


def _encoders(types: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Row]:
    """Return one row for each type and head: the level, and how far padded batches without pads are from padded."""
    columns = ("verdict", "level", "left pads", "outputs", "gradients", "control", "why")
    return [
        {"model_type": name, "head": HEADS[head], **_cells(result, *columns)}
        for name, heads in types.items()
        for head, result in heads.items()
    ]


def _causal_lms(types: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return one row for each model type: the result of unpatched TRL, and the level on a CPU and on CUDA.

    Patches that third parties registered come last.
    """
    from ..patches.registry import registered_patches

    lines = []
    for name, result in types.items():
        level = result.get("level", "")
        fast = "native where exact, else module" if level == "module" else level
        levels = {"CPU": level, "CUDA": level, "CUDA with kernels": fast}
        lines.append({"model_type": name, **_cells(result, "unpatched", "verdict"), **levels, "why": result["why"]})
    others = {name: patch for name, patch in registered_patches().items() if patch.origin != "trl_packfa"}
    lines += [
        {**dict.fromkeys(lines[0], ""), "model_type": name, "CPU": patch.level, "why": f"patch from {patch.origin}"}
        for name, patch in others.items()
    ]
    return lines


def _measured(versions: Mapping[str, str]) -> str:
    """Return a line with the versions that a table was measured with, and the installed ones that differ."""
    here = {name: installed_version(name) for name in versions}
    others = {name: version for name, version in here.items() if version not in versions[name].split(", ")}
    third_party = f"; here: {described(others)}; where the code differs, your model is checked" if others else ""
    return f"measured with {described(versions)}{third_party}"
