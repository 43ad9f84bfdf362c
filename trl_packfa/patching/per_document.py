"""Run any causal module document by document, which is exact for every way of mixing tokens.

The packed row is split into documents. Documents of similar length run together as a right-padded batch, and the
outputs are put back in place. A causal module never sees what comes after a token. So the padding (copies of a
document's last token) needs no mask: not for attention, recurrent state, short convolutions or position biases. The
cost is the padding inside a group.

Shape letters: B rows, L row length, T packed tokens (B * L), G documents of a group, M their longest length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from ..compile import around_graphs, outside_of_graphs
from ..errors import InvalidLayout, PackingError
from ..layout import PackedLayout
from ..layout.call_context import BOUNDARIES, is_empty_mask
from ..layout.length_groups import group_by_length

# Arguments `(L, L)` with each query's distance to each key, which is the same in every document. Since transformers
# 5.24 Inkling 2's backbone makes them for the whole row.
_DISTANCES = ("relative_distance",)
# Arguments that a backbone finds by itself for separate documents.
FOUND_BY_ITSELF = ("attention_mask", "position_ids")


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
    calls, shapes, place = _take_apart(args, kwargs, layout, sliding_window)
    outputs = []
    for positional, named in calls:  # not a comprehension: torch would compile that as a function of its own
        outputs.append(forward(*positional, **named))
    return _put_back(outputs, shapes, place, layout)


@outside_of_graphs
def _take_apart(
    args: Sequence[Any], kwargs: dict[str, Any], layout: PackedLayout, sliding_window: int | None
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[tuple[int, ...]], torch.Tensor]:
    """Return the arguments of each group, the groups' shapes `(G, M)`, and each packed token's place in the groups."""
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    # The packed call's mask is skipped: it has no elements, and may have another dtype than the scores.
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.numel()), torch.float32)
    groups, place = _groups(layout, tensors[0].device)
    calls = []
    for index_GM in groups:
        longest = index_GM.shape[1]
        # Its size is quadratic in their length, so it is made only if a call has an empty mask to replace.
        mask = cache(partial(_causal_mask, longest, sliding_window, dtype, index_GM.device))
        positional = tuple(_take(value, index_GM, layout, mask) for value in args)
        named = {name: _take(value, index_GM, layout, mask) for name, value in kwargs.items()}
        named |= {name: kwargs[name][:longest, :longest] for name in _DISTANCES if kwargs.get(name) is not None}
        calls.append((positional, named))
    return calls, [tuple(index.shape) for index in groups], place


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


def _groups(layout: PackedLayout, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the token numbers `(G, M)` of each group, and each packed token's place in the joined groups."""
    # All layers of a call need the same: it is computed on the host once, and copied to the device once.
    if ("groups", device) not in layout.memo:
        layout.memo["groups", device] = _make_groups(layout, device)
    return layout.memo["groups", device]


@torch.inference_mode(False)  # autograd accepts no tensors that were made there, and the layout may train afterwards
def _make_groups(layout: PackedLayout, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    # Example: lengths [1, 3] in one group, the longest first. The indices are [[1, 2, 3], [0, 0, 0]], and
    # [[1, 1, 1], [1, 0, 0]] of them are real. So the packed tokens 0, 1, 2, 3 lie at the group's places
    # [3, 0, 1, 2].
    starts = torch.tensor(layout.lengths).cumsum(0) - torch.tensor(layout.lengths)
    groups, place, filled = [], torch.empty(layout.num_tokens, dtype=torch.long), 0
    for group in group_by_length(layout.lengths, device):
        documents = torch.tensor(group)
        lengths_G1 = torch.tensor([layout.lengths[i] for i in group])[:, None]
        steps_M = torch.arange(int(lengths_G1.max()))
        index_GM = starts[documents][:, None] + steps_M.minimum(lengths_G1 - 1)
        real_GM = steps_M < lengths_G1
        place[index_GM[real_GM]] = filled + real_GM.flatten().nonzero().flatten()
        filled += index_GM.numel()
        groups.append(index_GM.to(device))
    return groups, place.to(device)


def _causal_mask(length: int, sliding_window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make the mask `(length, length)` that is added to the scores of a group's documents."""
    # The dtype's lowest number, not -inf, as in transformers' own masks.
    hidden = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=device)
    # With a window of 2, `tril(-2)` hides keys 0 and 1 from query 3, so it sees keys 2 and 3.
    return hidden.triu(1) if sliding_window is None else hidden.triu(1) + hidden.tril(-sliding_window)


def _take(value: Any, index_GM: torch.Tensor, layout: PackedLayout, mask: Callable[[], torch.Tensor]) -> Any:
    """Return a group's part of an argument."""
    if isinstance(value, (tuple, list)):
        return type(value)(_take(item, index_GM, layout, mask) for item in value)
    if is_empty_mask(value):
        mask_MM = mask()
        return mask_MM.expand(index_GM.shape[0], *(1,) * (value.dim() - 3), *mask_MM.shape)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.row_length:
        return value
    if value.shape[0] not in (1, layout.rows):
        return value
    # transformers makes positions and rotary tables with one row, which broadcasts over the batch.
    rows = value.expand(layout.rows, *value.shape[1:])
    return rows.flatten(0, 1).index_select(0, index_GM.flatten()).view(*index_GM.shape, *value.shape[2:])


@outside_of_graphs
def _put_back(
    outputs: Sequence[Any], shapes: Sequence[tuple[int, ...]], place: torch.Tensor, layout: PackedLayout
) -> Any:
    """Join the groups' outputs: tensors per token, inside tuples and transformers' outputs."""
    first = outputs[0]
    # transformers' `ModelOutput` is a dict whose class takes the fields by name.
    if isinstance(first, dict):
        merged = {name: _put_back([output[name] for output in outputs], shapes, place, layout) for name in first}
        return type(first)(**{name: value for name, value in merged.items() if value is not None})  # type: ignore[arg-type]
    if isinstance(first, (tuple, list)):
        merged = [_put_back(items, shapes, place, layout) for items in zip(*outputs, strict=True)]
        return type(first)(merged) if any(item is not None for item in merged) else None
    if not isinstance(first, torch.Tensor):
        return None
    if all(output.shape[:2] == shape for output, shape in zip(outputs, shapes, strict=True)):
        # -1: `_joined` may have widened the last dimension.
        return _joined([output.flatten(0, 1) for output in outputs], place).view(
            layout.rows, layout.row_length, *first.shape[2:-1], -1
        )
    if all(output.shape[:1] == (g * m,) for output, (g, m) in zip(outputs, shapes, strict=True)):
        return _joined(list(outputs), place)  # router logits have one row for each token
    return None


def _joined(flat: list[torch.Tensor], place: torch.Tensor) -> torch.Tensor:
    """Return the rows of all groups in packed order; a narrower last dim (top-k of a short document) ends in -1."""
    widest = max(tensor.shape[-1] for tensor in flat)
    flat = [
        torch.nn.functional.pad(t, (0, widest - t.shape[-1]), value=-1) if t.shape[-1] < widest else t for t in flat
    ]
    # The last layers of a backbone may lie on another device than its inputs.
    return torch.cat(flat).index_select(0, place.to(flat[0].device))


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
