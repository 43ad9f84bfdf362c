"""Display of a packed batch as text, with its documents and their trained tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from ...layout.from_call import layout_of

# Number of tokens shown of a document.
_SHOWN = 400


def describe_batch(batch: Mapping[str, Any], tokenizer: Any) -> str:
    """Decode each document of a packed batch on its own line, with trained text in double brackets.

    Args:
        batch (`Mapping[str, Any]`):
            The batch of a packing collator: `input_ids`, `labels` and boundaries.
        tokenizer (`PreTrainedTokenizerBase`):
            Decodes the tokens.
    """
    layout = layout_of(dict(batch))
    assert layout is not None, "the trainer has refused collators that do not mark where documents begin"
    padding = f", the last of them {layout.padding} tokens of padding" if layout.padding else ""
    lines = [f"{layout.num_tokens} tokens, {layout.num_documents} documents{padding}; [[trained]]"]
    documents = zip(layout.split(batch["input_ids"]), layout.split(batch["labels"]), strict=True)
    for number, (ids, labels) in enumerate(documents):
        trained = int((labels != -100).sum())
        text = "".join(_runs(ids[:_SHOWN], labels[:_SHOWN], tokenizer)) + (" ..." if len(ids) > _SHOWN else "")
        lines.append(f"document {number}, {len(ids)} tokens, {trained} trained: {text}")
    return "\n".join(lines)


def _runs(ids: torch.Tensor, labels: torch.Tensor, tokenizer: Any) -> Iterator[str]:
    """Decode runs of neighbouring tokens that are all trained or all not trained."""
    pairs = zip(ids.tolist(), labels.tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != -100):
        text = tokenizer.decode([token for token, _ in run])
        yield f"[[{text}]]" if trained else f" {text} "
