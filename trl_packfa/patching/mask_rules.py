"""Read documents and bidirectional spans off transformers' mask rules, without building a mask.

transformers describes a mask by a function of indices `(batch, head, query, key)` that says whether the query sees the
key. Two neighbours are enough: a token that does not see the one before it begins a document, and a token that sees
the one after it is in a span, whose tokens see each other in both directions.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from ..errors import PackingError
from ..layout.bidirectional import Span
from .inspect import own_config

# Maps indices `(batch, head, query, key)`, which broadcast, to bool.
Rule: TypeAlias = Callable[..., torch.Tensor]
# Architectures that look token types up in their table of words; others have a table with the name.
_TYPES_AMONG_WORDS = ("codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj")


def sees_ahead(rule: Rule, shape: tuple[int, int], device: Any) -> bool:
    """Tell whether a token attends to the one after it, as those of an image do."""
    return bool(_sees_next(rule, shape, device).any())


def sees_back(rule: Rule, shape: tuple[int, int], device: Any) -> bool:
    """Tell whether every token attends to the one before it; the first of a document in a row does not."""
    return bool(_sees_next(rule, shape, device, back=True).all())


class RowSpans(NamedTuple):
    """The spans of padded rows."""

    rows: tuple[tuple[Span, ...], ...]  # in columns of the row
    joined: bool = False  # whether the spans of a row see each other


def spans_in_rule(rule: Rule, padding: torch.Tensor, *, by_index: bool = True) -> RowSpans:
    """Read the spans of each row off a rule that leaves out the mask of padding `(B, L)`.

    Spans hold true tokens only. With `by_index=False` the rule takes single indices only, as one that the model has
    added may. Raise [`PackingError`] if some spans of a row see each other, and others do not.
    """
    rule, host = rule if by_index else partial(_over_each, rule), padding.detach().ne(0).cpu()
    ahead = _sees_next(rule, (host.shape[0], host.shape[1]), padding.device).cpu()
    ahead = ahead & host[:, :-1] & host[:, 1:]
    rows = tuple(_runs(row) for row in ahead.tolist())
    return RowSpans(rows, _are_joined(rule, rows, padding.device))


def _over_each(rule: Rule, *indices: torch.Tensor) -> torch.Tensor:
    """Apply a rule that takes single indices, by which it may index tensors, to tensors of indices of one shape."""
    for _ in indices[0].shape:
        rule = torch.vmap(rule)
    with TransformGetItemToIndex():
        return rule(*indices)


def _sees_next(rule: Rule, shape: tuple[int, int], device: Any, *, back: bool = False) -> torch.Tensor:
    """Return whether each token sees the next one, or with `back` the one before it; bool, `(B, L - 1)`."""
    rows = torch.arange(shape[0], device=device)[:, None]
    second = torch.arange(1, shape[1], device=device)[None]
    first = second - 1
    queries, keys = (second, first) if back else (first, second)
    return _sees(rule, rows, queries, keys)


def _sees(rule: Rule, rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return for each query whether it sees its key, bool, in the common shape of these indices."""
    rows, queries, keys = torch.broadcast_tensors(rows, queries, keys)
    return rule(rows, torch.zeros_like(rows), queries, keys).expand(rows.shape)


def _runs(ahead: list[bool]) -> tuple[Span, ...]:
    """Return the runs in which each token sees the next: [False, True, True, False] has one, of the tokens 1 to 3."""
    runs = (list(run) for seen, run in itertools.groupby(range(len(ahead)), ahead.__getitem__) if seen)
    return tuple((run[0], run[-1] + 2) for run in runs)


def _are_joined(rule: Rule, rows: Sequence[Sequence[Span]], device: Any) -> bool:
    """Tell whether the spans of a row see each other across the tokens between them."""
    pairs = []
    for row, spans in enumerate(rows):
        starts = [start for start, _ in spans]
        pairs += [(row, *pair) for pair in itertools.pairwise(starts)]
        if len(starts) > 2:
            pairs.append((row, starts[0], starts[-1]))
    if not pairs:
        return False
    # All pairs at once, as a GPU waits for each answer.
    seen = _sees(rule, *torch.tensor(pairs, device=device).unbind(1)).tolist()
    if any(seen) and not all(seen):
        examples = (pairs[seen.index(answer)] for answer in (True, False))
        linked, separate = (f"tokens {first} and {second} of row {row}" for row, first, second in examples)
        raise PackingError(
            f"{linked} see each other, across tokens that do not, but {separate} do not.",
            why=["packed attention computes spans that either all see each other or see only themselves"],
            do="Patch the model with unpad=False, or train on text alone.",
        )
    return all(seen)


def embeds_token_types(backbone: Any) -> bool:
    """Tell whether token types are looked up in a table, so that a packed row may have any.

    A backbone that builds its mask from them cannot be packed, as packing uses no mask.
    """
    if getattr(own_config(backbone), "model_type", None) in _TYPES_AMONG_WORDS:
        return True
    return any(isinstance(module, nn.Embedding) and "token_type" in name for name, module in backbone.named_modules())


def refuse_token_types(call: dict[str, Any]) -> None:
    """Refuse token types that are not all 0 in a packed call."""
    for name in call.keys() & {"token_type_ids", "mm_token_type_ids"}:
        # Tokenizers return all 0 for plain text, which does not change the mask.
        if isinstance(call[name], torch.Tensor) and call[name].any():
            raise PackingError(
                f"{name} are not all 0 in a packed batch.",
                why=[
                    "this model's mask lets tokens of a prefix or an image attend to each other in both directions",
                    "packed attention uses no mask, and is causal inside each document",
                ],
                do=f"Drop {name}, or pass the documents as a padded batch.",
            )
