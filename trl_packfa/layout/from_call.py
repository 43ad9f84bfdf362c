"""Find the documents of a forward call in the arguments that transformers and TRL send.

There are three sources, in this order: our collator's `packed_layout`, FlashAttention's `cu_seq_lens_*`,
`position_ids`. A batch without boundaries, a padded batch, a KV cache in use and continuous batching are not packed.
Boundaries beside a filled cache, and a mask of padding that numbers documents, would be ignored by the model, so they
are refused.

transformers 5.23 has two rules for positions without a mask: its masks begin a document wherever a position is not its
predecessor plus one, its FlashAttention wherever a position equals the row's smallest. So:

- Positions alone are boundaries if every document begins at the same position (0, or RoBERTa's 2) and counts by one.
  The two rules disagree about a document that skips positions, begins at another position, or goes back half way, so
  it is refused, with the advice to send `cu_seq_lens_q`.
- With explicit boundaries, positions count by one inside each document and may begin anywhere (a document whose
  beginning was cut off), except in a model that counts positions by itself: there they begin at 0.
- A row with a single document is not packed, and any positions are allowed.
- With a mask of padding transformers ignores positions. Restarts among the tokens under the mask would let documents
  see each other, so they are refused. A mask of four dimensions belongs to the caller, and the call is left alone.

On an accelerator `packed_layout` is trusted without reading tensors back, so that no forward waits for the device.
Arguments that lie on the host are compared with it.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import InvalidLayout, differing
from .call_checks import (
    host_positions,
    is_ones,
    refuse_contradictions,
    refuse_filled_cache,
    refuse_incomplete,
    refuse_numbered_mask,
    refuse_restarts_under_padding,
    require_offsets,
)
from .packed import PackedLayout

# `cache` since transformers 5.24; before it keys and values, states, and RWKV's list of states.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def layout_of(
    call: dict[str, Any], *, ignores_position_ids: bool = False, max_positions: int | None = None
) -> PackedLayout | None:
    """Return the documents of a forward call, `None` if it is not a packed batch.

    `call` maps argument names to values. An all-ones `attention_mask` and `use_cache=True` do not switch packing off;
    in transformers they do. `ignores_position_ids` means that the model ignores the call's `position_ids` and counts
    each document from 0. `max_positions` is the number of positions that the model has learned. Raise
    [`InvalidLayout`] if the sources contradict each other or the batch.
    """
    # `inputs_embeds` comes first, as in transformers: prompt tuning and image models embed tokens before the backbone.
    embedded = call.get("inputs_embeds")
    tokens = call.get("input_ids") if embedded is None else embedded
    if tokens is None or tokens.dim() < 2:
        return None
    # Continuous batching (`generate_batch`): its offsets of keys, one for each kind of layer, count what is cached.
    if isinstance(call.get("cu_seq_lens_k"), dict):
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    # Generation holds the next tokens of one document in each call, so this comes before the boundaries.
    if cache := filled_cache(call):
        refuse_filled_cache(call, shape, cache)
        return None
    refuse_numbered_mask(call.get("attention_mask"))
    # `packed_layout` has its lengths on the host. The others are copied from the device, which makes the host wait.
    layout = call.get("packed_layout")
    if layout is None and call.get("cu_seq_lens_q") is not None:
        layout = _from_flash_kwargs(call)
    layout = _from_position_ids(call, shape) if layout is None else _require_fit(layout, shape)
    if layout is None:
        refuse_incomplete(call)
    elif layout.shard is None:  # a shared row was compared with the other arguments when it was cut
        refuse_contradictions(layout, call, ignores_position_ids=ignores_position_ids, max_positions=max_positions)
    return layout


def _from_flash_kwargs(call: dict[str, Any]) -> PackedLayout:
    """Make a layout from `cu_seq_lens_q`, which must equal `cu_seq_lens_k`."""
    offsets_q, offsets_k = require_offsets(call, "cu_seq_lens_q"), call.get("cu_seq_lens_k")
    # Collators send one tensor under both names. Comparing it with itself would wait for the device twice.
    if offsets_k is not None and offsets_k is not offsets_q:
        offsets_k = require_offsets(call, "cu_seq_lens_k")
        if not torch.equal(offsets_q, offsets_k.to(offsets_q)):
            raise InvalidLayout(
                f"cu_seq_lens_q and cu_seq_lens_k differ: {differing(offsets_q.tolist(), offsets_k.tolist())}.",
                why=["in packed self-attention queries and keys are of the same documents"],
                do="Send one tensor for both.",
            )
    return PackedLayout.from_cu_seqlens(offsets_q)


def _require_fit(layout: Any, shape: tuple[int, int]) -> PackedLayout:
    """Refuse explicit boundaries that do not describe this batch; return them with the batch's number of rows."""
    if not isinstance(layout, PackedLayout):
        raise InvalidLayout(
            f"packed_layout is a {type(layout).__name__}, not a PackedLayout.",
            do="Make one: PackedLayout.from_lengths([...]).",
        )
    if layout.shard is not None:
        if shape != layout.local_shape:
            raise InvalidLayout(
                f"the row of {layout.num_tokens} tokens is shared, each process holds {layout.local_shape[1]}, the "
                f"batch has {shape[0]} x {shape[1]}.",
                do="Cut the batch with trl_packfa.shard_batch, which cuts tokens, labels and positions alike.",
            )
        return layout
    if layout.shares_prefixes:
        raise InvalidLayout(
            "packed_layout has documents that share prefixes.",
            why=["a patched model finds common prefixes by itself, in rows of whole documents"],
            do="Send whole documents to a model patched with unpad=True, share_prefixes=True.",
        )
    if layout.num_tokens != shape[0] * shape[1]:
        raise InvalidLayout(
            f"the boundaries describe {layout.num_tokens} tokens, the batch has {shape[0]} x {shape[1]}.",
            do="Send boundaries of the same batch.",
        )
    # FlashAttention's offsets do not tell the rows. The new layout refuses documents that cross the end of a row.
    return layout if layout.rows == shape[0] else replace(layout, rows=shape[0], memo={})


def _from_position_ids(call: dict[str, Any], shape: tuple[int, int]) -> PackedLayout | None:
    """Make a layout from `position_ids` alone; `None` for padding or one document in each row."""
    position_ids, mask = call.get("position_ids"), call.get("attention_mask")
    host = None if position_ids is None or not shape[1] else host_positions(position_ids, shape)
    if host is None:
        return None
    layout = PackedLayout.from_position_ids(host)
    # One document in each row has no boundary, and positions may begin anywhere, as when `generate()` continues.
    if layout.num_documents == shape[0]:
        return None
    if mask is not None and not is_ones(mask):
        refuse_restarts_under_padding(host, mask)
        return None
    # Tokenizers return a mask without zeros for a single text. It hides nothing, so positions decide.
    _require_common_start(host, layout.cu_seqlens[:-1].long())
    return layout.to(call["position_ids"].device)


def _require_common_start(host: torch.Tensor, starts: torch.Tensor) -> None:
    """Refuse documents that begin at different positions: transformers' two rules disagree about their boundaries."""
    first = host.flatten()[starts]
    odd = (first != first[0]).nonzero().flatten()
    if len(odd):
        row, column = divmod(int(starts[odd[0]]), host.shape[1])
        raise InvalidLayout(
            f"position_ids alone do not tell where documents begin: row {row} holds position {int(host[row, column])} "
            f"at token {column}, the first document begins at {int(first[0])}.",
            why=["a jump may be a new document or one that skips positions; transformers' masks and kernels disagree"],
            do="Send packed_layout or cu_seq_lens_q with them, or let each document count from 0.",
        )


def has_cache(call: dict[str, Any]) -> bool:
    """Tell whether a call has a cache, filled or empty."""
    return any(call.get(name) is not None for name in CACHES)


def filled_cache(call: dict[str, Any]) -> str | None:
    """Return the name of the argument by which a call continues an earlier one, `None` if it begins anew."""
    return next((name for name in CACHES if _is_filled(call.get(name))), None)


def without_caches(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without caches; every forward takes none by default."""
    return {name: value for name, value in call.items() if name not in CACHES}


def _is_filled(cache: Any) -> bool:
    """Tell whether a cache holds tokens; one that has no length counts as filled."""
    try:
        return cache is not None and cache.get_seq_length() > 0
    except (AttributeError, ValueError):
        return True
