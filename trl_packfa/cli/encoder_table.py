"""Table of the encoders by head, as rows for the terminal and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Heads in the order of the columns, and their words.
HEADS = {
    "SequenceClassification": "sequence classification",
    "TokenClassification": "token classification",
    "MaskedLM": "masked LM",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
    "Embeddings": "embeddings",
}

Types = Mapping[str, Mapping[str, Mapping[str, Any]]]


def rows(types: Types) -> list[dict[str, str]]:
    """Return one row for each type and head: the level, and how far padded batches without pads are from padded."""
    return [
        {
            "model_type": name,
            "head": HEADS[head],
            "verdict": result["verdict"],
            **{key: str(result.get(key, "")) for key in ("level", "left pads", "outputs", "gradients", "control")},
            "why": result.get("why", ""),
        }
        for name, heads in types.items()
        for head, result in heads.items()
    ]


def markdown(types: Types) -> str:
    """Return the table of the documentation: the level of each head, and each refusal with its reason."""
    exact = [result for heads in types.values() for result in heads.values() if result["verdict"] == "exact"]
    lines = [f"| type | {' | '.join(HEADS.values())} |", f"|---|{'---|' * len(HEADS)}"]
    served: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for name, heads in types.items():
        cells = tuple(_cell(heads.get(head)) for head in HEADS)
        if any(result["verdict"] == "exact" for result in heads.values()):
            served.setdefault(cells, []).append(name)
        for why, of in _refusals(heads).items():
            reasons.setdefault(why, []).append(f"`{name}`" + (f" ({', '.join(of)})" if of else ""))
    by_reach = sorted(served.items(), key=lambda item: (-item[0].count("stack"), -len(item[1])))
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |" for cells, names in by_reach]
    worst = {key: max(result[key] for result in exact) for key in ("outputs", "gradients")}
    least = min(result["control"] for result in exact)
    lines += [
        "",
        f"{len(exact)} heads of {sum(map(len, served.values()))} types are exact in float32: outputs are off by "
        f"{worst['outputs']:.1e} at most, gradients by {worst['gradients']:.1e}. Rows that see each other, or their "
        f"pads, are off by {least:.1e} at least. In bfloat16, outputs without pads are at most {_in_half(exact):.1f} "
        "times as far from float64 as those with pads.",
        "",
        "Not served, with the reason:",
        "",
    ]
    lines += [f"- {', '.join(names)}: {why}." for why, names in reasons.items()]
    unknown = [name for name, heads in types.items() if {of["verdict"] for of in heads.values()} == {"not built"}]
    lines += ["", f"No small model could be built of these, so your own is checked ({len(unknown)}): "
              f"{', '.join(f'`{name}`' for name in unknown)}."]  # fmt: skip
    return "\n".join(lines)


def _in_half(exact: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest ratio of the errors in bfloat16, without and with pads."""
    return max(result["bfloat16"] / result["padded"] for result in exact if "bfloat16" in result)


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None or result["verdict"] == "not built":
        return ""
    return result["level"] if result["verdict"] == "exact" else "no"


def _refusals(heads: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the heads of each reason for a refusal, none if all heads are refused for it."""
    reasons: dict[str, list[str]] = {}
    for head, result in heads.items():
        if result["verdict"] not in ("exact", "not built"):
            reasons.setdefault(_plain(result["why"]), []).append(HEADS[head])
    tried = [result for result in heads.values() if result["verdict"] != "not built"]
    return {why: [] if len(of) == len(tried) else of for why, of in reasons.items()}


def _plain(why: str) -> str:
    """Return a reason without its numbers, which differ between heads."""
    if "padded batches without their pads are not exact" in why:
        return "its rows differ with other pads around them, so none can be removed"
    if "get_input_embeddings" in why:
        return "its code does not say where its input embeddings are"
    return why.removeprefix("level groups: ").split(". ")[0].rstrip(".")
