"""Tokenizers and their chat templates, before anything is tokenized.

Templates are tried: TRL passes tools and tool calls to the template and does not check whether they appear
in the text. A template that ignores tool calls renders an assistant's call as an empty turn.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import AutoProcessor
from trl import is_conversational, maybe_convert_to_chatml
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from ..config.common import CommonConfig
from ..errors import InvalidConfig, InvalidDataset, PackingError, figure
from .dataset import AnyDataset
from .files import missing_path


def load_tokenizer(name: str, args: CommonConfig, *, otherwise: str = "") -> Any:
    """Load the tokenizer or processor of a model, as TRL loads it; `otherwise` ends the advice of the error."""
    try:
        return AutoProcessor.from_pretrained(
            name, revision=args.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"cannot load a tokenizer or processor from '{name}'.",
            why=missing_path(name) or [str(error)],
            do="Check the name, or copy the missing files into the folder: the tokenizer's for text, the processor's "
            "for a vision model" + (f", {otherwise}." if otherwise else "."),
        ) from error


def unmarkable(tokenizer: Any) -> list[str]:
    """Return why nothing marks the assistant's tokens: no template, or one that TRL cannot mark; `[]` if it can."""
    template = getattr(tokenizer, "chat_template", None)
    if template is not None:
        if has_generation_markers(template):
            return []
        try:
            get_training_chat_template(tokenizer)
            return []
        except ValueError:
            pass
    files, suffix = (resources.files("trl") / "chat_templates").iterdir(), "_training.jinja"
    marked = sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix))
    why = "its chat template has no {{% generation %}} markers, and TRL cannot add them"
    return [
        "the tokenizer has no chat template" if template is None else why,
        f"TRL can mark the unchanged templates of {', '.join(marked)}",
    ]


def with_template(tokenizer: Any, args: Any) -> Any:
    """Return the tokenizer with the chat template that `chat_template_path` names, as TRL reads it."""
    named = getattr(args, "chat_template_path", None)
    if named is None:
        return tokenizer
    if not Path(named).is_file():
        return load_tokenizer(named, args)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = Path(named).read_text(encoding="utf-8")
    return tokenizer


# Number of examples to render: spread over a dataset, or the first ones of a stream.
_LOOKED_AT, _LOOKED_AT_OF_STREAM = 200, 16


@figure("word on what the chat template ignores")
def left_out_by_template(
    dataset: Dataset | IterableDataset, processing_class: Any, chat_template: str | None = None
) -> list[str]:
    """Describe content that the template ignores, with the share of examples, each rendered with and without it."""
    looked_at, roles = 0, dict[str, None]()
    left_out = {"tools": 0, "tool calls": 0}
    for example in map(as_chatml, _some(dataset)):
        looked_at += 1
        roles |= dict.fromkeys(_roles(example))
        for name, ignored in _ignored(example, processing_class, chat_template).items():
            left_out[name] += ignored
    lost = {"tools": "the tools that it may call", "tool calls": "the assistant's calls and has empty turns instead"}
    doubts = [f"the chat template may not know all roles of the conversations. {rename_advice(roles)}"]
    return doubts * bool(rename_advice(roles)) + [
        f"the chat template ignores {name}: in {count / looked_at:.0%} of the examples ({count} of {looked_at} looked "
        f"at) the trained text lacks {lost[name]}. Use the model's own template, or chat_template_path."
        for name, count in left_out.items()
        if count
    ]


def as_chatml(example: Any) -> dict[str, Any]:
    """Return an example with `role` and `content` in its messages."""
    # A stream's messages may be the user's own objects.
    return maybe_convert_to_chatml(copy.deepcopy(dict(example)))


# Columns that hold messages.
_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
# The roles of ShareGPT's format. TRL renames its keys, but not its roles.
_SHARE_GPT = {"human": "user", "gpt": "assistant"}


def _roles(example: Any) -> list[str]:
    """List the roles of an example's messages, in their order, each message once."""
    lists = (example.get(column) for column in _MESSAGES)
    held = [message for messages in lists if isinstance(messages, list) for message in messages]
    return [str(message.get("role")) if isinstance(message, dict) else repr(message) for message in held]


def rename_advice(roles: Iterable[str]) -> str:
    """Say how to rename the roles of ShareGPT's format among these; `""` if there are none."""
    found = [f"'{role}' to '{_SHARE_GPT[role]}'" for role in dict.fromkeys(roles) if role in _SHARE_GPT]
    return f"Rename the roles: {', '.join(found)}." if found else ""


@contextmanager
def naming_conversations(dataset: AnyDataset, *, name: str, **options: Any) -> Iterator[None]:
    """Turn an error of the chat template into one that names the conversation. `options` are those of [`rendered`]."""
    try:
        yield
    except PackingError:
        raise
    except Exception:  # a template can raise anything
        if isinstance(dataset, Dataset):
            for number, example in enumerate(dataset):
                rendered(example, number, name=name, **options)
        raise


def named_conversations(dataset: AnyDataset, *, name: str, **options: Any) -> AnyDataset:
    """Return a stream whose conversations are tried as they are read; a `Dataset` is returned as it is."""
    if isinstance(dataset, Dataset) or not holds_conversations(dataset):
        return dataset
    return dataset.map(rendered, with_indices=True, fn_kwargs={"name": name, **options})


def rendered(
    example: Any, number: int, *, name: str, tokenizer: Any, chat_template: str | None = None, assistant: bool = False
) -> dict[str, Any]:
    """Refuse a conversation that the chat template cannot render, or, for `assistant`, that has no assistant's turn.

    Returns an empty dict, which adds no column.
    """
    example = as_chatml(example)
    roles, empty = _roles(example), [column for column in _MESSAGES if example.get(column) == []]
    if "input_ids" in example or not (roles or empty):
        return {}
    before = example["prompt"] if isinstance(example.get("prompt"), list) else []
    after = [example[column] for column in _MESSAGES if column != "prompt" and isinstance(example.get(column), list)]
    why = f"'{empty[0]}' holds no message" if empty else "a message has no 'role'" if "None" in roles else ""
    try:
        options = rendering_options(example, chat_template)
        for messages in [] if why else after or [[]]:
            tokenizer.apply_chat_template([*before, *messages], tokenize=False, **options)
    except Exception as error:
        why = f"the chat template: {str(error) or repr(error)}".partition("\n")[0]
    if not why and assistant and "assistant" not in roles:
        why = "no message has the role 'assistant'"
    if why:
        raise InvalidDataset(
            f"conversation {number} of the {name} dataset cannot be trained; its roles are {', '.join(roles)}.",
            why=[why],
            do=rename_advice(roles) or "Mend it, filter it out, or use a chat template that allows it.",
        )
    return {}


def rendering_options(example: Any, chat_template: str | None) -> dict[str, Any]:
    """Return the options with which TRL renders an example: its template, tools, and template arguments."""
    tools = example.get("tools")
    # Tools with different schemas fit no Arrow type, so datasets store them as JSON.
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"chat_template": chat_template, "tools": tools, **(example.get("chat_template_kwargs") or {})}


def holds_conversations(dataset: AnyDataset) -> bool:
    """Tell whether a dataset's first example has messages, which need a chat template."""
    return holds_conversation(next(iter(dataset), {}))


def holds_conversation(example: Any) -> bool:
    """Tell whether an example has messages."""
    example = as_chatml(example)
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
    if "input_ids" in example or not is_conversational(example):
        return {}
    messages = example["messages"] if "messages" in example else [*example["prompt"], *example["completion"]]
    has = {"tools": bool(example.get("tools")), "tool calls": any(message.get("tool_calls") for message in messages)}
    if not any(has.values()):
        return {}
    silent = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]

    def text(of: Any, **other: Any) -> str | None:
        try:
            options = {**rendering_options(example, chat_template), "tokenize": False, **other}
            return processing_class.apply_chat_template(of, **options)
        except Exception:  # a template can raise anything; TRL will raise it soon, with the example
            return None

    whole = text(messages)
    # A template that fails without the content does not ignore it.
    without = {"tools": text(messages, tools=None), "tool calls": text(silent)}
    return {} if whole is None else {name: has[name] and other == whole for name, other in without.items()}


def vocabulary_hash(tokenizer: Any) -> str:
    """Describe a vocabulary by its size and a hash of its tokens."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{token}\n".encode())
    return f"{len(vocabulary)} tokens, {digest.hexdigest()[:16]}"
