"""Requirements of datasets, of what a tokenizer makes of them, and of images, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from trl import is_conversational

from ...config.requirements import Found, Requirement, where
from ...data.dataset import TEXT_COLUMNS
from ...data.templates import holds_conversation, unmarkable
from ...errors import InvalidDataset
from .training import Training
from .trials import how_collator_fails

# Names in other formats for a prompt, for more text of the prompt, and for the answer. The first existing one is used.
_PROMPTS = ("instruction", "question", "query", "problem", "prompt", "input")
_BESIDE_PROMPTS = ("input", "context")
_ANSWERS = ("output", "answer", "response", "solution", "completion", "target")


def suggested_columns(example: Mapping[str, Any]) -> dict[str, str]:
    """Suggest templates that make 'prompt' and 'completion' from the columns of another format, such as Alpaca's.

    The result is empty if the example has no prompt and answer in text.

    Example: `{"instruction": "Add.", "input": "1 2", "output": "3"}` gives `{"prompt": "{instruction}\\n{input}\\n",
    "completion": "{output}"}`.
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


def _wrong_type(run: Training) -> Any:
    found = run.first(lambda given: not isinstance(given, Dataset | IterableDataset) and [given], of="datasets")
    if not found:
        return None
    name, (given,) = found
    do = "Make one: datasets.Dataset.from_list(rows), with a dictionary for each example."
    if isinstance(given, dict):
        do = "Name one of its splits."
    if isinstance(given, str | Path):
        do = f'Load it: datasets.load_dataset("json", data_files="{given}", split="train"), or by its Hub name.'
    return name, type(given).__name__, do


def _without_messages(example: dict[str, Any]) -> str:
    return next((column for column in TEXT_COLUMNS if example.get(column) == []), "")


def _no_conversation(example: dict[str, Any]) -> list[str]:
    return [] if is_conversational(example) else sorted(example)


def _expected(run: Training) -> dict[str, tuple[type, ...]]:
    """Return the types that TRL's columns hold; none if the user's function or data collator handles any format."""
    if run.formats or run.given.get("formatting_func") is not None or not (run.packs_rows or run.makes_text):
        return {}
    tokens, messages = (list, tuple, np.ndarray), (list,)
    texts = {"prompt": (str, list), "completion": (str, list), run.dataset_text_field: (str,)}
    return {"input_ids": tokens, "labels": tokens, "messages": messages, "conversations": messages, **texts}


def _no_format(run: Training) -> Any:
    expected = _expected(run)

    def unknown(example: dict[str, Any]) -> Any:
        whole = ("prompt" in example) == ("completion" in example)
        return None if whole and expected.keys() & example.keys() else [example]

    if not expected or not (found := run.first(unknown)):
        return None
    name, (example,) = found
    advice = columns_advice(suggested_columns(example))
    if {"chosen", "rejected"} <= example.keys():
        advice = "To train on pairs, use --trainer dpo or reward: PackedDPOTrainer, PackedRewardTrainer."
    return name, sorted(example), advice or "Rename the columns, set dataset_text_field, or pass formatting_func."


def _wrong_values(run: Training) -> Any:
    expected = _expected(run)

    def wrong(example: dict[str, Any]) -> Any:
        held = {column: value for column, value in example.items() if column in expected}
        return next(((c, type(value).__name__, " or ".join(kind.__name__ for kind in expected[c]))
                     for c, value in held.items() if not isinstance(value, expected[c])), None)  # fmt: skip

    return run.first(wrong)


def _wrong_columns(run: Training) -> Any:
    def wrong(example: dict[str, Any]) -> Any:
        known = any(name.endswith("_ids") for name in example)
        return None if known or any(set(wanted) <= example.keys() for wanted in run.formats) else sorted(example)

    if not run.formats or not (found := run.first(wrong)):
        return None
    name, there = found
    wanted = ", or ".join(" and ".join(repr(column) for column in columns) for columns in run.formats)
    do = "Rename the columns, or make them: --columns 'NAME=TEMPLATE' on the command line."
    if "completion" in there:
        do = "For 'prompt' and 'completion' use SFT: PackedSFTTrainer, or --trainer sft."
    return name, there, wanted, do


def _on_the_fly(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and dataset.format["type"] == "custom"


def _other_policy(run: Training) -> str:
    """Return TRL's policy for long pairs if the arguments ask for another one."""
    default: Any = next((f.default for f in fields(run.args) if f.name == "overflow"), "")
    return default if not run.is_sft and run.overflow != default else ""


def _unmarked(run: Training) -> Any:
    why = run.assistant_only_loss and run.tokenizer is not None and unmarkable(run.tokenizer)
    return why and Found(True, why)


def _without_template(run: Training) -> Any:
    if not (run.datasets and run.tokenizer is not None and run.makes_text):
        return None
    return getattr(run.tokenizer, "chat_template", None) is None and run.first(holds_conversation)


def _missing_file(run: Training) -> bool:
    path = Path(run.chat_template_path or "")
    return path.suffix in (".jinja", ".j2") and not path.is_file()


def _unmarking_collator(run: Training) -> Any:
    collator = run.given.get("data_collator")
    why = "" if collator is None else how_collator_fails(collator)
    return why and Found(type(collator).__name__, [why])


DATA = (
    Requirement(_wrong_type,
        "{found[0]}_dataset must be a `Dataset` or `IterableDataset`, not {found[1]}.",
        do="{found[2]}", error=InvalidDataset),
    # TRL's trainers that generate.
    Requirement(lambda r: r.num_generations
        and r.first(lambda dataset: isinstance(dataset, IterableDataset), of="datasets"),
        "the {found[0]} dataset is a stream. TRL's {r.name} cannot train on streams.",
        do="Drop dataset_streaming.", error=InvalidDataset),
    Requirement(lambda r: r.first(lambda example: not example),
        "the {found[0]} dataset is empty.",
        do="Check the split, filters and file names.", error=InvalidDataset),
    Requirement(lambda r: r.first(_without_messages),
        "the first example of the {found[0]} dataset has no message in '{found[1]}'.",
        do="Filter such examples out.", error=InvalidDataset),
    Requirement(lambda r: r.assistant_only_loss and r.first(_no_conversation),
        "assistant_only_loss=True, but the {found[0]} dataset holds no conversations.",
        why="its columns are {found[1]}, and no message in them has a role",
        do="Leave assistant_only_loss off, or bring messages with 'role' and 'content'.", error=InvalidDataset),
    Requirement(_wrong_columns,
        "the {found[0]} dataset has columns {found[1]}; {r.name} cannot train on them.",
        why="wanted: {found[2]}", do="{found[3]}", error=InvalidDataset),
    *where(lambda r: r.packing,
        Requirement(lambda r: r.is_stream and _other_policy(r),
            "overflow='{r.overflow}' with a stream.",
            why="its pairs are not known before they are read, so TRL cuts or drops them",
            do="Drop overflow (the default is '{found}'), or load the whole dataset."),
        Requirement(lambda r: not r.takes_images and r.images[1],
            "the {r.images[0]} dataset has a column '{found}', and {r.name} takes no images.",
            why="TRL's own trainer takes none: it would tokenize the text alone",
            do="Drop the column to train on the text alone. PackedDPOTrainer and PackedKTOTrainer take images.",
            error=InvalidDataset),
        Requirement(lambda r: r.images[1] and _other_policy(r),
            "overflow='{r.overflow}' with images.",
            why="their tokens exist only after collation, where TRL cuts them",
            do="Drop overflow (the default is '{found}')."),
    ),
    *where(lambda r: r.packing and not r.is_on_images,
        Requirement(lambda r: r.first(_on_the_fly, of="datasets"),
            "the {found[0]} dataset is transformed on the fly (set_transform or with_transform).",
            why="packing plans with lengths before training, and a resumed run must see the same documents",
            do="Use dataset.map(...), which is computed once, or reset_format().", error=InvalidDataset),
    ),
    *where(lambda r: r.packs_rows,
        Requirement(lambda r: r.is_stream and r.plan.recuts_steps
            and not (r.max_length or r.max_tokens_per_microbatch),
            "packing_strategy='step' on a stream needs a token budget: max_length is None.",
            why="the longest document of a stream is not known before training",
            do="Set max_length or max_tokens_per_microbatch, or use packing_strategy='minibatch'."),
        Requirement(_unmarking_collator,
            "data_collator {found} does not carry document boundaries.",
            why="its batch of two small documents does not say where the second begins",
            do="Leave data_collator unset, use trl_packfa.DataCollatorForPacking, or train padded with "
            "packing=False."),
    ),
    # Padded batches of images run without their pads.
    *where(lambda r: r.is_on_images,
        Requirement(lambda r: r.plan.fills_rows,
            "rows cannot be filled before training: the dataset has images in its column '{r.images[1]}'.",
            why="a processor makes their tokens during collation, so the length of an example is not known before",
            do="Use packing_strategy='step', which re-cuts each step, or 'minibatch'."),
        Requirement(lambda r: r.sequence_parallel > 1,
            "sequence_parallel={r.sequence_parallel}, but the dataset has images in its column '{r.images[1]}'.",
            why="such batches run padded rows without their pads, and only packed rows can be shared",
            do="Drop sequence_parallel, or the column to train on the text alone."),
        Requirement(lambda r: r.overflow != "truncate",
            "overflow='{r.overflow}' has no effect on images (column '{r.images[1]}').",
            why="their tokens exist only after collation, where TRL cuts them to max_length",
            do="Drop it. Set max_length=None, so that nothing is cut."),
        Requirement(lambda r: r.share_prefixes and ("expand_turns" if r.expand_turns else "share_prefixes"),
            "{found}=True with images (column '{r.images[1]}').",
            why="equal token ids may stand for different images, so documents are not known to begin alike",
            do="Drop it, or the column to train on the text alone."),
        Requirement(lambda r: r.loss_by,
            "loss_by='{found}' has no effect on images (column '{r.images[1]}').",
            why="TRL's collator of images drops other columns", do="Drop it."),
    ),
    # Of SFT. Its rows may be anything if a collator of the user takes them, so the collator is tried before.
    Requirement(_no_format,
        "the {found[0]} dataset has columns {found[1]}, which is no TRL format.",
        why="wanted: '{r.dataset_text_field}', 'messages', 'prompt' and 'completion', or 'input_ids'",
        do="{found[2]}", error=InvalidDataset),
    Requirement(_wrong_values,
        "column '{found[1][0]}' of the {found[0]} dataset holds {found[1][1]}, expected {found[1][2]}.",
        do="Convert the column before training.", error=InvalidDataset),
)  # fmt: skip

# Of the tokenizer, which is loaded for them.
TEXTS = (
    Requirement(_missing_file,
        "chat_template_path={r.chat_template_path}: there is no such file.", do="Check the path."),
    Requirement(_unmarked,
        "assistant_only_loss=True: nothing marks the assistant's tokens.",
        why="the chat template has no {{% generation %}} markers, and TRL cannot add them",
        do="Leave assistant_only_loss off, put {{% generation %}} and {{% endgeneration %}} around the assistant's "
        "text, or name a template that has them with chat_template_path."),
    Requirement(_without_template,
        "the {found[0]} dataset holds conversations, but the tokenizer has no chat template.",
        why="a chat template turns messages into text; base models often have none",
        do="Set tokenizer.chat_template and pass the tokenizer as processing_class, or save it so. SFT also takes "
        "chat_template_path: a .jinja file, or the name or folder of a model that has one."),
)  # fmt: skip
