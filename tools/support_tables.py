"""Print a table of the documentation from the measured results or the code, as Markdown.

    python tools/support_tables.py models | training | images | encoders | adapters | requirements

The pages hold its output between comments with the command; tests compare both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from trainer_runs import COMPARED, trains_as_padded

from trl_packfa.adapters import table
from trl_packfa.adapters.table import EXACT
from trl_packfa.cli.models import HEADS, number
from trl_packfa.config.arguments import ARGUMENTS, WITHOUT_PADS
from trl_packfa.patches.measured import composites, encoders, results, training
from trl_packfa.trainers.requirements.built import BUILT, PATCHED
from trl_packfa.trainers.requirements.data import DATA, TEXTS
from trl_packfa.trainers.requirements.runs import LAUNCH, MACHINE, MODEL

Results = Mapping[str, Mapping[str, Any]]
Answer = TypeVar("Answer", str, tuple[str, str])


def model_table(types: Results) -> str:
    """Return the table of causal-LM types: each level, what it runs, and its model types."""
    lines = ["| level | types | what runs | which |", "|---|---|---|---|"]
    for level, what in _LEVELS.items():
        names = [name for name, of in types.items() if of.get("level") == level and of["verdict"] == "exact"]
        lines.append(f"| {level} | {len(names)} | {what} | {_names(names)} |")
    refused = {name: result["why"] for name, result in types.items() if result["verdict"] != "exact"}
    return "\n".join([*lines, "", *_refused(f"refused ({len(refused)})", refused)])


def training_table(types: Mapping[str, Results]) -> str:
    """Return what training the causal-LM types has shown, and the table of those that train otherwise than TRL's."""
    runs = [(name, way, result) for name, ways in types.items() for way, result in ways.items()]
    same = [result for _, _, result in runs if result["verdict"] == "same"]
    loss, norm = (number(max(result[key] for result in same)) for key in ("loss", "grad_norm"))
    answers: dict[str, dict[str, list[str]]] = {}
    for name, way, result in runs:
        if (what := _special(result)) is not None:
            answers.setdefault(what, {}).setdefault(name, []).append(way)
    rows = [f"| {', '.join(_with_ways(*item) for item in of.items())} | {what} |" for what, of in answers.items()]
    return "\n".join([
        f"{len(types)} types were trained for two steps with `PackedSFTTrainer`, in full and with its adapter, "
        f"beside TRL's `SFTTrainer` on padded batches (`python tools/training_matrix.py`). {len(same)} of the "
        f"{len(runs)} runs are the same: losses are off by {loss} at most, norms of the gradients by {norm}.",
        "",
        *(["| type | what is special |", "|---|---|", *rows] if rows else []),
    ])  # fmt: skip


def _with_ways(name: str, ways: Sequence[str]) -> str:
    return f"`{name}`" if len(ways) > 1 else f"`{name}` ({ways[0]})"


def _special(result: Mapping[str, Any]) -> str | None:
    """Return what is special in a run of training, `None` if nothing is."""
    if result["verdict"] == "same":
        special = [_BESIDE[what] for what in result["beside"][1:]]
        return f"TRL's loss is not the model's: {'; '.join(special)}" if special else None
    if result["verdict"] == "not trained by TRL":
        return f"TRL's trainer raises (`{result['why'].split('. ')[0][:80]}`); ours {result['packed']}"
    if (again := result.get("float64")) is not None:
        worst = [f"{number(of['loss'])} and {number(of['grad_norm'])}" for of in (result, again)]
        return f"losses and norms are off by {worst[0]} in float32, by {worst[1]} in float64"
    return f"{result['verdict']}: {result.get('why', '')}".rstrip(": ")


_BESIDE = {
    "on the model's own logits": "its fused head leaves something out, so ours uses the model's own logits",
}


def _refused(title: str, reasons: Mapping[str, str]) -> list[str]:
    """Return the table of refused types, one row a reason."""
    rows = [f"| {_names(names)} | {why} |" for why, names in _grouped(reasons).items()]
    return [f"| {title} | why |", "|---|---|", *rows]


def _grouped(answers: Mapping[str, Answer]) -> dict[Answer, list[str]]:
    """Return the names that have the same answer, by answer."""
    groups: dict[Answer, list[str]] = {}
    for name, answer in answers.items():
        groups.setdefault(answer, []).append(name)
    return groups


_LEVELS = {
    "attention": "the attention forward is rewritten for packed tokens",
    "interface": "attention goes through transformers' attention and mask interfaces; position embeddings that count "
    "along the row, and sparse indexers, run by document",
    "module": "what mixes tokens beside or instead of attention runs by document, or on its own kernels where those "
    "provably honour boundaries; everything else is packed",
    "document": "the whole backbone runs by document, in right-padded groups of similar lengths",
}


def composite_table(types: Results) -> str:
    """Return the table of types with images or sounds: by result, and each refusal with its reason."""
    exact = {name: result for name, result in types.items() if result["verdict"] == "exact"}
    seen = [name for name, result in exact.items() if not result["images"].startswith("not tried")]
    text = [name for name in exact if name not in seen]
    both = [name for name, result in exact.items() if result.get("bidirectional")]
    worst = {key: max(exact[name][key] for name in seen) for key in ("logits", "gradients")}
    off = f"logits off by {worst['logits']:.1e} at most, gradients by {worst['gradients']:.1e}"
    groups = {
        f"exact with images or sounds ({off})": seen,
        "exact on text; images or sounds in a form that was not tried": text,
        "of both, with image tokens that see each other in both directions": both,
    }
    lines = ["| result | types | which |", "|---|---|---|"]
    lines += [f"| {what} | {len(names)} | {_names(names)} |" for what, names in groups.items() if names]
    # The error of a type's own code stands after a colon, and differs between types.
    refused = {
        name: result["why"].split(":")[0].rstrip(".")
        for name, result in types.items()
        if result["verdict"] not in ("exact", "not built")
    }
    unknown = [name for name, result in types.items() if result["verdict"] == "not built"]
    lines += ["", *_refused(f"refused with images ({len(refused)})", refused)]
    return "\n".join([*lines, "", _not_built(unknown), "", _trained("types", exact.values())])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _not_built(names: Sequence[str]) -> str:
    return f"No small model could be built of these, so your own is checked ({len(names)}): {_names(names)}."


def _trained(what: str, exact: Collection[Mapping[str, Any]]) -> str:
    """Return how many of these trained two steps in a trainer as the padded run did, and how far they were apart."""
    runs = [result["trainer"] for result in exact if "trainer" in result]
    same = [run for run in runs if trains_as_padded(run)]
    # Where float32 was too coarse, the figure is that of the run in float64.
    worst = {key: max((run.get("float64", run)[key] for run in same), default=0.0) for key in COMPARED}
    again = sum("float64" in run for run in same)
    failed = f" {again} of them in float64, because float32 is too coarse there." if again else ""
    failed += f" {len(runs) - len(same)} did not." if len(same) < len(runs) else ""
    return (
        f"{len(same)} of the {len(exact)} exact {what} were trained: two steps in the trainer, beside the padded run. "
        f"Losses were off by {worst['loss']:.1e} at most, gradient norms by {worst['grad_norm']:.1e}.{failed}"
    )


def encoder_table(types: Mapping[str, Results]) -> str:
    """Return the table of encoders: the level of each head, and each refusal with its reason."""
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
    lines += [f"| {_names(names)} | {' | '.join(cells)} |" for cells, names in by_reach]
    worst = {key: max(result[key] for result in exact) for key in ("outputs", "gradients")}
    least = min(result["control"] for result in exact)
    lines += [
        "",
        f"{len(exact)} heads of {sum(map(len, served.values()))} types are exact in float32: outputs are off by "
        f"{worst['outputs']:.1e} at most, gradients by {worst['gradients']:.1e}. Rows that see each other, or their "
        f"pads, are off by {least:.1e} at least. In bfloat16, outputs without pads are at most "
        f"{_in_half(exact, ''):.1f} times as far from float64 as those with pads, gradients "
        f"{_in_half(exact, ' gradients'):.1f} times.",
        "",
        f"{_trained('heads', exact)} With their pads trained {_with_pads(types)}.",
        "",
        "| not served | why |",
        "|---|---|",
    ]
    lines += [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
    unknown = [name for name, heads in types.items() if {of["verdict"] for of in heads.values()} == {"not built"}]
    return "\n".join([*lines, "", _not_built(unknown)])


def _with_pads(types: Mapping[str, Results]) -> str:
    """Return the heads whose trainer ran with pads: their loss reads them, or the decoder's inputs have their own."""
    found = []
    for head, words in HEADS.items():
        runs = {name: heads[head]["trainer"] for name, heads in types.items() if "trainer" in heads.get(head, {})}
        names = [name for name, run in runs.items() if run.get("saved") == 0]
        if names:
            found.append(words if len(names) == len(runs) else f"{words} of {_names(names)}")
    return " and ".join(found)


def _in_half(exact: Iterable[Mapping[str, Any]], of: str) -> float:
    """Return the largest ratio of the errors in bfloat16, without and with pads."""
    return max(result[f"bfloat16{of}"] / result[f"padded{of}"] for result in exact if f"padded{of}" in result)


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


def adapter_table(kinds: Results) -> str:
    """Return the table of PEFT's tuners: the exact kinds, and the refused kinds with reason and remedy."""
    exact = {kind: row for kind, row in kinds.items() if row["verdict"] == EXACT}
    logits, gradients = (number(max(row[name] for row in exact.values())) for name in ("logits", "gradients"))
    lines = [
        f"Exact ({len(exact)}; logits off by {logits} at most, gradients by {gradients}):",
        "",
        f"{_names(exact)}.",
        "",
        f"Refused ({len(kinds) - len(exact)}):",
        "",
        "| kind | why | what to do |",
        "|---|---|---|",
    ]
    refused = {kind: (row["why"], row["do"]) for kind, row in kinds.items() if row["verdict"] != EXACT}
    lines += [f"| {_names(names)} | {why} | {what} |" for (why, what), names in _grouped(refused).items()]
    return "\n".join(lines)


# Rows of what a run requires, by what must be known for them.
_REQUIREMENTS = {
    "Arguments": ARGUMENTS,
    "Arguments of trainers that run padded batches without their pads": WITHOUT_PADS,
    "Several processes, packages, the trainer's other arguments": (*MACHINE, *LAUNCH),
    "Data": (*DATA, *TEXTS),
    "The model": (*MODEL, *BUILT, *PATCHED),
}


def requirement_table() -> str:
    """Return the tables of what is refused: each row of the requirements, with dots for what a message fills in."""
    lines = []
    for title, rows in _REQUIREMENTS.items():
        lines += [f"**{title}**", "", "| refused | why | instead |", "|---|---|---|"]
        lines += [f"| {' | '.join(map(_with_dots, (row.shown or row.what, row.why, row.do)))} |" for row in rows]
        lines += [""]
    return "\n".join(lines[:-1])


def _with_dots(text: str) -> str:
    # Doubled braces are braces of the message.
    dotted = re.sub(r"(?<!\{)\{[^{}%]+\}(?!\})", "...", text).replace("{{", "{").replace("}}", "}")
    return "" if dotted == "..." else dotted.removesuffix(".").replace("|", "\\|")


TABLES = {
    "models": lambda: model_table(results()),
    "training": lambda: training_table(training()["types"]),
    "images": lambda: composite_table(composites()["types"]),
    "encoders": lambda: encoder_table(encoders()["types"]),
    "adapters": lambda: adapter_table(table.results()),
    "requirements": requirement_table,
}


def on_page(name: str, page: str) -> str:
    """Return the table that a page holds."""
    begin = f"<!-- generated: python tools/support_tables.py {name} -->\n"
    return page.split(begin)[1].split("\n<!-- end -->")[0]


if __name__ == "__main__":
    print(TABLES[sys.argv[1]]())
