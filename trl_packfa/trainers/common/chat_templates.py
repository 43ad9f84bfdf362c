"""Detection of chat templates that leave tools and tool calls out of the trained text.

TRL passes both to the template and does not check whether they appear in the text. A template that ignores tool calls
renders an assistant's call as an empty turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from trl import is_conversational, maybe_convert_to_chatml

# Number of examples to render: spread over a dataset, or the first ones of a stream.
_LOOKED_AT, _LOOKED_AT_OF_STREAM = 200, 16


def left_out_by_template(
    dataset: Dataset | IterableDataset, processing_class: Any, chat_template: str | None = None
) -> list[str]:
    """Describe, in a sentence each, the kinds of content that the template ignores, with the share of examples.

    Each example is rendered with the content and without it.
    """
    looked_at = 0
    left_out = {"tools": 0, "tool calls": 0}
    for example in _some(dataset):
        looked_at += 1
        for name, ignored in _ignored(example, processing_class, chat_template).items():
            left_out[name] += ignored
    lost = {"tools": "the tools that it may call", "tool calls": "the assistant's calls and has empty turns instead"}
    return [
        f"the chat template ignores {name}: in {count / looked_at:.0%} of the examples ({count} of {looked_at} looked "
        f"at) the trained text lacks {lost[name]}. Use the model's own template, or chat_template_path."
        for name, count in left_out.items()
        if count
    ]


def holds_conversations(dataset: Dataset | IterableDataset) -> bool:
    """Tell whether a dataset's first example has messages, which need a chat template."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    example = maybe_convert_to_chatml(dict(next(iter(dataset), {})))
    if "input_ids" in example or [] in example.values():  # TRL would fail on an empty list of messages
        return False
    return is_conversational(example)


def _some(dataset: Dataset | IterableDataset) -> Iterator[dict[str, Any]]:
    if isinstance(dataset, IterableDataset):
        yield from dataset.take(_LOOKED_AT_OF_STREAM)
        return
    number = min(_LOOKED_AT, len(dataset))
    for index in np.linspace(0, len(dataset) - 1, num=number, dtype=int):
        yield dataset[int(index)]


def _ignored(example: dict[str, Any], processing_class: Any, chat_template: str | None) -> dict[str, bool]:
    """Tell, for tools and for tool calls, whether the example has them and its text is the same without them."""
    example = maybe_convert_to_chatml(dict(example))
    if "input_ids" in example or not is_conversational(example):
        return {}
    messages = example["messages"] if "messages" in example else [*example["prompt"], *example["completion"]]
    tools, calls = example.get("tools"), any(message.get("tool_calls") for message in messages)
    if not tools and not calls:
        return {}
    silent = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    options = {"chat_template": chat_template, **(example.get("chat_template_kwargs") or {}), "tokenize": False}
    try:
        # Tools with different schemas fit no Arrow type, so datasets store them as JSON.
        tools = json.loads(tools) if isinstance(tools, str) else tools
        whole = processing_class.apply_chat_template(messages, tools=tools, **options)
    except Exception:  # a template can raise anything; TRL will raise it soon, with the example
        return {}
    found = {}
    for name, has, other in (("tools", tools, (messages, None)), ("tool calls", calls, (silent, tools))):
        try:
            found[name] = (
                bool(has) and processing_class.apply_chat_template(other[0], tools=other[1], **options) == whole
            )
        except Exception:  # a template that fails without the content does not ignore it
            found[name] = False
    return found
