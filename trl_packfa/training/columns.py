"""Columns of other formats than TRL's, such as Alpaca's, and how TRL's are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from ..errors import InvalidConfig

# What other formats call a prompt, with what stands beside it, and an answer to it; the first that is there counts.
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_BESIDE_PROMPTS = ("input", "context")
_ANSWERS = ("output", "answer", "response", "solution", "completion", "target")


def suggested_columns(example: Mapping[str, Any]) -> dict[str, str]:
    """Templates that make 'prompt' and 'completion' of the columns of another format, such as Alpaca's; empty if the
    example has no prompt and answer in text.

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
    """Say how columns are made of others, on the command line and in Python; empty without templates."""
    if not templates:
        return ""
    shown = {name: template.replace("\n", "\\n") for name, template in templates.items()}
    flags = " ".join(f"'{name}={template}'" for name, template in shown.items())
    made = ", ".join(f'"{name}": "{template}".format(**row)' for name, template in shown.items())
    return f"Pass --columns {flags} to `trl-packfa train`, or call\ndataset = dataset.map(lambda row: {{{made}}})"


def make_columns(dataset: Any, templates: Sequence[str] | None) -> Any:
    """Make columns of others, and take away those that were used up.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Of any columns.
        templates (`Sequence[str]`, *optional*):
            Each `NAME=TEMPLATE`, the template with columns in braces and `\\n` for a line break. A column that is
            `None` is read as an empty string.

    Raises:
        [`InvalidConfig`]: for what is no template, or names a column that is not there.
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
            f"columns={list(templates)} makes no columns of {sorted(there)}.",
            why=[f"the dataset has no column {name!r}" for name in unknown] or ["a template is NAME=TEMPLATE"],
            do="Write for example --columns 'prompt={question}\\n' 'completion={answer}'.",
        )
    made = {name: template.replace("\\n", "\n") for name, template in made.items()}
    return dataset.map(_filled_in, fn_kwargs={"templates": made}, remove_columns=sorted(used - set(made)))


def _filled_in(row: dict[str, Any], templates: dict[str, str]) -> dict[str, str]:
    texts = {name: "" if value is None else value for name, value in row.items()}
    return {name: template.format(**texts) for name, template in templates.items()}
