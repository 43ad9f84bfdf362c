"""Run any causal module document by document, which is exact for every way of mixing tokens.

The packed row is split into documents. Documents of similar length run together as a right-padded batch, and the
outputs are put back in place. A causal module never sees what comes after a token. So the padding needs no mask: not
for attention, recurrent state, short convolutions or position biases. The cost is the padding inside a group.

Shape letters: B rows, L row length, G documents of a group, M their longest length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..compile import around_graphs, outside_of_graphs
from ..errors import InvalidLayout, PackingError
from ..layout import PackedLayout
from ..layout.call_context import BOUNDARIES, is_empty_mask
from ..layout.length_groups import group_by_length, pack_groups, pad_groups

# Arguments `(L, L)` with each query's distance to each key, which is the same in every document. Since transformers
# 5.24 Inkling 2's backbone makes them for the whole row.
_DISTANCES = ("relative_distance",)
# Arguments that a backbone finds by itself for separate documents.
FOUND_BY_ITSELF = ("attention_mask", "position_ids")
# The numbers of documents that run together, the longest first.
Groups: TypeAlias = Sequence[Sequence[int]]


@around_graphs
def run_by_document(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layout: PackedLayout,
    *,
    sliding_window: int | None = None,
) -> Any:
    """Run `forward` on the documents of a packed call; return its outputs with the packed tokens in place.

    Every argument of shape `(B, L, ...)` is split by group, inside tuples too. The packed call's empty mask becomes a
    causal mask of the group's size, under which a query sees `sliding_window` tokens. Outputs per token are put back
    together, the others are dropped.
    """
    groups, calls = _take_apart(args, kwargs, layout, sliding_window)
    outputs = []
    for positional, named in calls:  # not a comprehension: torch would compile that as a function of its own
        outputs.append(forward(*positional, **named))
    return _put_back(outputs, groups, layout)


@outside_of_graphs
def _take_apart(
    args: Sequence[Any], kwargs: dict[str, Any], layout: PackedLayout, sliding_window: int | None
) -> tuple[Groups, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the groups of documents, and the arguments of each group."""
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    # The packed call's mask is skipped: it has no elements, and may have another dtype than the scores.
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.numel()), torch.float32)
    device = tensors[0].device
    groups = group_by_length(layout.lengths, device)
    # Its size is quadratic in their length, so it is made only if a call has an empty mask to replace.
    mask = cache(partial(_causal_mask, sliding_window=sliding_window, dtype=dtype, device=device))
    leaves, form = tree_flatten((args, kwargs))
    taken = zip(*(_take(value, groups, layout, mask) for value in leaves), strict=True)
    calls = [tree_unflatten(own, form) for own in taken]
    for group, (_, named) in zip(groups, calls, strict=True):
        longest = layout.lengths[group[0]]
        named |= {name: kwargs[name][:longest, :longest] for name in _DISTANCES if kwargs.get(name) is not None}
    return groups, calls


@around_graphs
def run_backbone_by_document(forward: Callable[..., Any], call: dict[str, Any], layout: PackedLayout) -> Any:
    """Run a whole backbone with [`run_by_document`]; the backbone finds positions and masks by itself.

    Raise [`InvalidLayout`] if `position_ids` are not those of documents that each start at 0. Raise [`PackingError`]
    if the call asks for hidden states of every layer.
    """
    _require_plain(call, layout)
    for name in FOUND_BY_ITSELF:
        call.pop(name, None)
    return run_by_document(forward, (), call, layout)


def _causal_mask(length: int, sliding_window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make the mask `(length, length)` that is added to the scores of a group's documents."""
    # The dtype's lowest number, not -inf, as in transformers' own masks.
    hidden = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=device)
    # With a window of 2, `tril(-2)` hides keys 0 and 1 from query 3, so it sees keys 2 and 3.
    return hidden.triu(1) if sliding_window is None else hidden.triu(1) + hidden.tril(-sliding_window)


def _take(value: Any, groups: Groups, layout: PackedLayout, mask: Callable[[int], torch.Tensor]) -> Sequence[Any]:
    """Return each group's part of an argument."""
    if is_empty_mask(value):
        masks = [mask(layout.lengths[group[0]]) for group in groups]
        return [
            mask_MM.expand(len(group), *(1,) * (value.dim() - 3), *mask_MM.shape)
            for group, mask_MM in zip(groups, masks, strict=True)
        ]
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.row_length:
        return [value] * len(groups)
    if value.shape[0] not in (1, layout.rows):
        return [value] * len(groups)
    # transformers makes positions and rotary tables with one row, which broadcasts over the batch.
    rows = value.expand(layout.rows, *value.shape[1:])
    return pad_groups(rows.flatten(0, 1), layout.lengths, groups)


@outside_of_graphs
def _put_back(outputs: Sequence[Any], groups: Groups, layout: PackedLayout) -> Any:
    """Join the groups' outputs: tensors per token, inside tuples and transformers' outputs."""
    first = outputs[0]
    # transformers' `ModelOutput` is a dict whose class takes the fields by name.
    if isinstance(first, dict):
        merged = {name: _put_back([output[name] for output in outputs], groups, layout) for name in first}
        return type(first)(**{name: value for name, value in merged.items() if value is not None})  # type: ignore[arg-type]
    if isinstance(first, (tuple, list)):
        merged = [_put_back(items, groups, layout) for items in zip(*outputs, strict=True)]
        return type(first)(merged) if any(item is not None for item in merged) else None
    if not isinstance(first, torch.Tensor):
        return None
    shapes = [(len(group), layout.lengths[group[0]]) for group in groups]
    if all(output.shape[:2] == shape for output, shape in zip(outputs, shapes, strict=True)):
        packed = pack_groups(_widened(outputs), layout.lengths, groups)
        return packed.view(layout.rows, layout.row_length, *packed.shape[1:])
    if all(output.shape[:1] == (g * m,) for output, (g, m) in zip(outputs, shapes, strict=True)):
        # Router logits have one row for each token.
        batches = [output.view(*shape, *output.shape[1:]) for output, shape in zip(outputs, shapes, strict=True)]
        return pack_groups(batches, layout.lengths, groups)
    return None


def _widened(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all groups with the widest last dimension: a narrower one (top-k of a short document) ends in -1."""
    widest = max(batch.shape[-1] for batch in batches)
    pads = [widest - batch.shape[-1] for batch in batches]
    return [F.pad(batch, (0, n), value=-1) if n else batch for batch, n in zip(batches, pads, strict=True)]


@outside_of_graphs
def _require_plain(call: dict[str, Any], layout: PackedLayout) -> None:
    if call.get("output_hidden_states"):
        raise PackingError(
            "hidden states of every layer cannot be returned where the backbone runs document by document.",
            do="Pass output_hidden_states=False, or the documents as a padded batch.",
        )
    positions = call.get("position_ids")
    if positions is not None and not torch.equal(positions.expand(layout.rows, -1), layout.position_ids()):
        raise InvalidLayout(
            "position_ids do not count each document from 0, but this model runs each document by itself, from 0.",
            do="Let positions restart at 0 at each boundary.",
        )
