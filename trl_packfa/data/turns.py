"""One training example for each assistant turn of a conversation (`expand_turns=True`), and rows that share a history.

A chat template may render an earlier turn in another way than the last one; templates of reasoning models drop the
thoughts of earlier turns. Then a conversation is not one example: each assistant turn is an example of its own, with
the history as the template renders it there. The examples of a conversation are one row of the dataset, so that they
stay in one micro-batch, where the model computes their common history once.

Shape letters: S examples of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from ..errors import InvalidDataset
from ..layout.prefix_tree import common_length
from ..packing import PackingReport
from .collator import LOSSES, ROW_LENGTHS, SAVED
from .dataset import AnyDataset, cut_some, split_tree, tree_columns
from .templates import as_chatml, rename_advice, rendering_options

# Column with the number of an example's conversation, until its examples are one row.
CONVERSATION = "trl_packfa_conversation"
# Number of a stream's conversations that one call expands.
_EXPANDED_TOGETHER = 16

# Renders messages as token ids; with `add_generation_prompt=True` up to where the assistant begins to write.
Render = Callable[..., list[int]]


class TurnExpander:
    """The way from conversations to rows of examples, one for each assistant turn.

    `chat_template` is used instead of the tokenizer's. `keep` is a column that every example of a conversation gets.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None, keep: str | None = None
    ) -> None:
        self.tokenizer, self.chat_template, self.keep = tokenizer, chat_template, keep

    def expand(self, dataset: Dataset, *, name: str, num_proc: int | None) -> Dataset:
        """Make an example of each assistant turn: `input_ids`, and `labels` on this turn alone."""
        require_conversations(dataset, name=name)
        return dataset.map(
            self._examples, batched=True, with_indices=True, remove_columns=dataset.column_names, num_proc=num_proc,
            desc=f"Expanding the turns of the {name} dataset",
        )  # fmt: skip

    def expand_stream(self, dataset: IterableDataset, *, limit: int | None, **limits: Any) -> IterableDataset:
        """Make the rows of a stream's conversations. `limit` is that of [`join`], `limits` are those of a stream's
        cut."""
        require_conversations(dataset, name="train")

        def rows(conversations: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            return join_some(cut_some(self._examples(conversations, indices), **limits), limit)

        columns = list(next(iter(dataset)))
        return dataset.map(
            rows, batched=True, batch_size=_EXPANDED_TOGETHER, with_indices=True, remove_columns=columns
        )  # fmt: skip

    def _examples(self, conversations: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """Return the examples of some conversations, in order."""
        kept = [] if self.keep is None or self.keep not in conversations else [self.keep]
        examples: dict[str, list[Any]] = {name: [] for name in ("input_ids", "labels", CONVERSATION, *kept)}
        for i, index in enumerate(indices):
            conversation = {name: values[i] for name, values in conversations.items()}
            for ids, start in self._turns(conversation, index):
                examples["input_ids"].append(ids)
                examples["labels"].append([-100] * start + ids[start:])
                examples[CONVERSATION].append(index)
                for name in kept:
                    examples[name].append(conversation[name])
        return examples

    def _turns(self, conversation: dict[str, Any], index: int) -> Iterator[tuple[list[int], int]]:
        """Yield the tokens of each assistant turn with its history, and where the turn begins."""
        messages = as_chatml(conversation)["messages"]
        roles = [message["role"] for message in messages]
        turns = [i for i, role in enumerate(roles) if role == "assistant"]
        if not turns:
            raise InvalidDataset(
                f"conversation {index} has no assistant turn, so there is nothing to train on.",
                why=[f"its roles are {', '.join(roles)}"],
                do=rename_advice(roles) or "Filter it out.",
            )
        render = self._renderer(conversation)
        for turn in turns:
            whole = render(messages[: turn + 1])
            prompt = render(messages[:turn], add_generation_prompt=True) if turn else _opening(render, whole)
            start = common_length(np.array(prompt), np.array(whole))
            # Some templates end the prompt in another way than the whole conversation goes on, and TRL too begins the
            # completion where they differ. But the history itself must be the same.
            if start == len(whole) or (turn and start < len(render(messages[:turn]))):
                raise InvalidDataset(
                    f"conversation {index}: the chat template renders the messages before turn {turn} in another way "
                    "once the turn is there.",
                    why=["so the history that the turn is trained on is not the one that it answers"],
                    do="Use a template that renders a history alike with and without the turn after it, or "
                    "expand_turns=False.",
                )
            yield whole, start

    def _renderer(self, conversation: dict[str, Any]) -> Render:
        """Return the function that renders messages with a conversation's tools and template arguments, as TRL
        does."""
        options = rendering_options(conversation, self.chat_template)

        def render(messages: list[dict[str, Any]], **more: Any) -> list[int]:
            rendered: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, **options, **more
            )
            return list(rendered["input_ids"])

        return render


def _opening(render: Render, whole: list[int]) -> list[int]:
    """Return the tokens before the first message's text, if the assistant opens the conversation.

    transformers renders no empty conversation. So the prompt for an answer is taken from another conversation, and
    found in this one, after what the template may put before it.
    """
    other = [{"role": "user", "content": "."}]
    asks = render(other, add_generation_prompt=True)[len(render(other)) :]
    places = (i for i in range(len(whole) - len(asks)) if whole[i : i + len(asks)] == asks)
    place = next(places, None) if asks else 0
    return whole if place is None else whole[: place + len(asks)]  # all of it is refused


def require_conversations(dataset: AnyDataset, *, name: str) -> None:
    """Refuse a dataset whose first example has no `messages`."""
    example = as_chatml(next(iter(dataset)))
    if "input_ids" in example or "messages" not in example or not is_conversational(example):
        raise InvalidDataset(
            f"expand_turns=True, but the {name} dataset has no conversations in 'messages'.",
            why=[f"its columns are {sorted(example)}"],
            do="Bring messages with 'role' and 'content', or drop expand_turns.",
        )


def join(examples: Dataset, report: PackingReport, *, limit: int | None, name: str) -> tuple[Dataset, PackingReport]:
    """Make one row of the examples of each conversation; report the tokens that the rows save.

    The examples are those of [`TurnExpander.expand`], cut, with their counts; those of a conversation are neighbours.
    `limit` is the number of tokens of a row that may be computed. A conversation with more becomes several rows, each
    with the history that its examples need.
    """
    numbers = np.array(examples[CONVERSATION])
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    spans = Dataset.from_dict({"start": starts, "stop": [*starts[1:], len(numbers)]})

    def rows(parts: dict[str, list[int]]) -> dict[str, list[Any]]:
        joined = [join_some(examples[start:stop], limit) for start, stop in zip(*parts.values(), strict=True)]
        return {column: [row for part in joined for row in part[column]] for column in joined[0]}

    dataset = spans.map(
        rows, batched=True, batch_size=_EXPANDED_TOGETHER, remove_columns=spans.column_names,
        desc=f"Joining the turns of the {name} dataset",
    )  # fmt: skip
    return dataset, replace(report, shared_tokens=sum(dataset[SAVED]))


def join_some(examples: dict[str, list[Any]], limit: int | None) -> dict[str, list[Any]]:
    """Make one row of the examples of each conversation, see [`join`]; counts of a stream's losses are added up."""
    numbers = examples.pop(CONVERSATION)
    rows: dict[str, list[Any]] = {column: [] for column in (*examples, ROW_LENGTHS, SAVED)}
    for number in dict.fromkeys(numbers):
        of_one = [i for i, other in enumerate(numbers) if other == number]
        for part, tree in split_tree([examples["input_ids"][i] for i in of_one], limit):
            chosen = [of_one[i] for i in part]
            for column, values in examples.items():
                of_part = [values[i] for i in chosen]
                rows[column].append(_joined(column, of_part))
            for column, value in tree_columns(tree, [len(examples["input_ids"][i]) for i in chosen]).items():
                rows[column].append(value)
    return rows


def _joined(column: str, values: list[Any]) -> Any:
    """Return the value of a row from those of its examples."""
    if column in ("input_ids", "labels"):
        return [token for value in values for token in value]
    return [sum(counts) for counts in zip(*values, strict=True)] if column == LOSSES else values[0]
