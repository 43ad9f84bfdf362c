"""What a chat template leaves out of a conversation: tools and tool calls that the trained text does not hold.

TRL hands both to the template and does not look whether they come back. A template that knows neither makes an empty
turn of an assistant's call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from trl import is_conversational, maybe_convert_to_chatml

# Examples that are rendered, spread over a dataset; of a stream, which is read for it, the first ones.
_LOOKED_AT, _LOOKED_AT_OF_STREAM = 200, 16


def left_out_by_template(
    dataset: Dataset | IterableDataset, processing_class: Any, chat_template: str | None = None
) -> list[str]:
    """A sentence for each kind of content that the template ignores, with the share of examples; each example is
    rendered with it and without.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            As the user passed it.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`):
            Has the chat template.
        chat_template (`str`, *optional*):
            Another one than its own.
    """
    looked_at = 0
    left_out = {"tools": 0, "tool calls": 0}
    for example in _some(dataset):
        looked_at += 1
        for name, ignored in _ignored(example, processing_class, chat_template).items():
            left_out[name] += ignored
    told = {
        "tools": "the tools that it may call",
        "tool calls": "what the assistant calls, an empty turn in its place",
    }
    return [
        f"the chat template ignores {name}: in {count / looked_at:.0%} of the examples ({count} of {looked_at} looked "
        f"at) the text that is trained lacks {told[name]}. Use the model's own template, or chat_template_path."
        for name, count in left_out.items()
        if count
    ]


def holds_conversations(dataset: Dataset | IterableDataset) -> bool:
    """Whether a dataset's first example has messages, of which a chat template makes text."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    example = maybe_convert_to_chatml(dict(next(iter(dataset), {})))
    if "input_ids" in example or [] in example.values():  # TRL would look at the first message of none
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
    """Whether what an example has of tools, and of calls, changes nothing of its text."""
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
        # Tools whose schemas differ fit no Arrow type, so datasets hold them as JSON.
        tools = json.loads(tools) if isinstance(tools, str) else tools
        whole = processing_class.apply_chat_template(messages, tools=tools, **options)
    except Exception:  # whatever a template raises, TRL is about to raise it, with the example at hand
        return {}
    found = {}
    for name, has, other in (("tools", tools, (messages, None)), ("tool calls", calls, (silent, tools))):
        try:
            found[name] = (
                bool(has) and processing_class.apply_chat_template(other[0], tools=other[1], **options) == whole
            )
        except Exception:  # a template that cannot do without it does not ignore it
            found[name] = False
    return found
