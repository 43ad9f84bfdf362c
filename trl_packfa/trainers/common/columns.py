"""Conversion of other dataset formats, such as Alpaca's, to TRL's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from ...errors import InvalidConfig

# Names in other formats for a prompt, for more text of the prompt, and for the answer. The first existing one is used.
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_BESIDE_PROMPTS = ("input", "context")
_ANSWERS = ("output", "answer", "response", "solution", "completion", "target")


def suggested_columns(example: Mapping[str, Any]) -> dict[str, str]:
    """Suggest templates that make 'prompt' and 'completion' from the columns of another format, such as Alpaca's.

    The result is empty if the example has no prompt and answer in text.

    Example: `{"instruction": "Add.", "input": "1 2", "output": "3"}` gives
    `{"prompt": "{instruction}\\n{input}\\n", "completion": "{output}"}`.
    """
    texts = [column for column, value in example.items() if isinstance(value, str) or value is None]
    prompt = next((column for column in _PROMPTS if column in texts), None)
    answer = next((column for column in _ANSWERS if column in texts and column != prompt), None)
    if prompt is None or answer is None:
        return {}
    beside = [column for column in _BESIDE_PROMPTS if column in texts and column != prompt]
    parts = [prompt, *beside[:1]]
    return {"prompt": "".join(f"{{{part}}}\n" for part in parts), "completion": f"{{{answer}}}"}


def columns_advice(templates: Mapping[str, str]) -> str:
    """Say how to make the columns, on the command line and in Python; return `""` without templates."""
    if not templates:
        return ""
    shown = {name: template.replace("\n", "\\n") for name, template in templates.items()}
    flags = " ".join(f"'{name}={template}'" for name, template in shown.items())
    made = ", ".join(f'"{name}": "{template}".format(**row)' for name, template in shown.items())
    return f"Pass --columns {flags} to `trl-packfa train`, or call\ndataset = dataset.map(lambda row: {{{made}}})"


def make_columns(dataset: Any, templates: Sequence[str] | None) -> Any:
    """Make new columns from others, and remove the columns that were used.

    Each template is `NAME=TEMPLATE`, with column names in braces and `\\n` for a line break. A value `None` is read as
    an empty string.
    """
    if not templates:
        return dataset
    made: dict[str, str] = {name: made_of for name, _, made_of in (one.partition("=") for one in templates)}
    there = dataset.column_names or list(next(iter(dataset), {}))
    try:
        parsed = [part for template in made.values() for part in Formatter().parse(template)]
        used = {column for _, column, _, _ in parsed if column is not None}
    except ValueError as error:
        raise InvalidConfig(f"columns={list(templates)}: {error}.", do="Write a brace that is text twice.") from error
    unknown = sorted(used - set(there))
    if unknown or not all(made.values()):
        raise InvalidConfig(
            f"columns={list(templates)} cannot make columns from {sorted(there)}.",
            why=[f"the dataset has no column {name!r}" for name in unknown] or ["a template is NAME=TEMPLATE"],
            do="Write for example --columns 'prompt={question}\\n' 'completion={answer}'.",
        )
    made = {name: template.replace("\\n", "\n") for name, template in made.items()}
    return dataset.map(_filled_in, fn_kwargs={"templates": made}, remove_columns=sorted(used - set(made)))


def _filled_in(row: dict[str, Any], templates: dict[str, str]) -> dict[str, str]:
    texts = {name: "" if value is None else value for name, value in row.items()}
    return {name: template.format(**texts) for name, template in templates.items()}
