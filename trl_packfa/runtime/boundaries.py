"""Which documents a forward call holds, read from the arguments that transformers and TRL send.

Three sources, in this order: our collator's `packed_layout` (nothing to compute), FlashAttention's `cu_seq_lens_*`,
`position_ids`. A batch without boundaries, a padded batch, a KV cache in use and continuous batching give `None`: they
are not ours.
Boundaries beside a filled cache, and a mask of padding that numbers documents, would be ignored: refused.

What positions mean. transformers 5.23 has two rules for a row without a mask: its masks begin a document wherever a
position is not its predecessor plus one, its FlashAttention wherever a position equals the row's smallest. TRL's
collators send positions that restart at 0, for which both say the same. So:

- Positions alone are boundaries if every document begins at the same position (0, or RoBERTa's 2) and counts by one.
  A document that skips positions, is numbered from its middle on, or goes back half way is read differently by the two
  rules, and its boundaries cannot be told from positions: refused, with the advice to send `cu_seq_lens_q`.
- With explicit boundaries, positions count by one inside each document and may begin anywhere (a document whose
  beginning was cut off); they are what the model sees. Where the model counts positions by itself, only those from 0.
- One document per row is not packed: any positions are the model's own business.
- With a mask of padding transformers ignores positions. Restarts among the tokens that count would let documents see
  each other: refused. A mask of four dimensions is its author's own, and the call is left alone.

On an accelerator `packed_layout` is believed without reading tensors back, so that no forward waits for the device;
everything else is compared with it where it lies on the host.

Shape letters: B rows, L row length.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidLayout
from ..layout import PackedLayout
from .caches import filled_cache, is_continuous_batching
from .validate import (
    host_positions,
    is_ones,
    refuse_beside_cache,
    refuse_contradictions,
    refuse_incomplete,
    refuse_numbered_mask,
    refuse_restarts_under_padding,
    require_offsets,
)


def layout_of(
    call: dict[str, Any], *, ignores_position_ids: bool = False, max_positions: int | None = None
) -> PackedLayout | None:
    """The documents of a forward call, `None` if it is not a packed batch.

    `call` maps argument names to values. An all-ones `attention_mask` and `use_cache=True` do not switch packing
    off, as they do in transformers. `ignores_position_ids` says that the model will not use the call's `position_ids`,
    but count each document from 0, `max_positions` how many it knows.

    Raises:
        [`InvalidLayout`]: if the sources contradict each other or the batch.
    """
    # `inputs_embeds` wins, as in transformers: prompt tuning and models with images embed tokens before the backbone.
    embedded = call.get("inputs_embeds")
    tokens = call.get("input_ids") if embedded is None else embedded
    if tokens is None or tokens.dim() < 2 or is_continuous_batching(call):
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    # Before the boundaries are read: a filled cache means generation, where each call holds the next tokens of one
    # document.
    if cache := filled_cache(call):
        refuse_beside_cache(call, shape, cache)
        return None
    # Whatever else the call says: such a mask is wrong beside every source of boundaries.
    refuse_numbered_mask(call.get("attention_mask"))
    # The order is by cost. `packed_layout` knows its lengths on the host; the two others are tensors that are copied
    # from the device, which makes the host wait.
    layout = call.get("packed_layout")
    if layout is None and call.get("cu_seq_lens_q") is not None:
        layout = _from_flash_kwargs(call)
    if layout is not None:
        layout = _require_fit(layout, shape)
        refuse_contradictions(layout, call, ignores_position_ids=ignores_position_ids, max_positions=max_positions)
        return layout
    layout = _from_position_ids(call, shape)
    if layout is None:
        refuse_incomplete(call)
    else:
        refuse_contradictions(layout, call, ignores_position_ids=ignores_position_ids, max_positions=max_positions)
    return layout


def _from_flash_kwargs(call: dict[str, Any]) -> PackedLayout:
    """Layout from `cu_seq_lens_q`, which must equal `cu_seq_lens_k`."""
    offsets_q, offsets_k = require_offsets(call, "cu_seq_lens_q"), call.get("cu_seq_lens_k")
    # Collators send one tensor under both names: comparing it with itself would wait for the device twice.
    if offsets_k is not None and offsets_k is not offsets_q:
        offsets_k = require_offsets(call, "cu_seq_lens_k")
        if not torch.equal(offsets_q, offsets_k.to(offsets_q)):
            raise InvalidLayout(
                f"cu_seq_lens_q {offsets_q.tolist()} and cu_seq_lens_k {offsets_k.tolist()} differ.",
                why=["in packed self-attention queries and keys are of the same documents"],
                do="Send one tensor for both.",
            )
    return PackedLayout.from_cu_seqlens(offsets_q)


def _require_fit(layout: Any, shape: tuple[int, int]) -> PackedLayout:
    """Explicit boundaries must describe exactly this batch."""
    if not isinstance(layout, PackedLayout):
        raise InvalidLayout(
            f"packed_layout is a {type(layout).__name__}, not a PackedLayout.",
            do="Make one: PackedLayout.from_lengths([...]).",
        )
    if layout.num_tokens != shape[0] * shape[1]:
        raise InvalidLayout(
            f"the boundaries describe {layout.num_tokens} tokens, the batch has {shape[0]} x {shape[1]}.",
            do="Send boundaries of the same batch.",
        )
    # FlashAttention's offsets do not say how the tokens are laid out in rows. The new layout requires that no document
    # crosses the end of one.
    if layout.rows != shape[0]:
        layout = PackedLayout(layout.cu_seqlens, layout.lengths, rows=shape[0])
    return layout


def _from_position_ids(call: dict[str, Any], shape: tuple[int, int]) -> PackedLayout | None:
    """Layout from `position_ids` alone; one document per row, or padding, is no packed batch."""
    position_ids, mask = call.get("position_ids"), call.get("attention_mask")
    if position_ids is None or not shape[1]:
        return None
    host = host_positions(position_ids, shape)
    if host is None:
        return None
    starts = torch.ones(shape, dtype=torch.bool)
    # For positions [0, 1, 2, 0, 1] the tokens 0 and 3 begin a document: starts [1, 0, 0, 1, 0].
    starts[:, 1:] = host[:, 1:] != host[:, :-1] + 1
    # One document a row: no boundary to honour, and positions may begin anywhere, as when `generate()` goes on.
    if int(starts.sum()) == shape[0]:
        return None
    if mask is not None and not is_ones(mask):
        refuse_restarts_under_padding(host, mask)
        return None
    # A mask without zeros is what tokenizers return for a single text. It hides nothing, so positions decide.
    layout = PackedLayout.from_position_ids(host)
    _require_common_start(host, starts)
    return layout.to(position_ids.device)


def _require_common_start(host: torch.Tensor, starts: torch.Tensor) -> None:
    """Only then do transformers' two rules agree on where documents begin."""
    first = host[starts]
    odd = (first != first[0]).nonzero().flatten()
    if len(odd):
        row, column = starts.nonzero()[odd[0]].tolist()
        raise InvalidLayout(
            f"position_ids alone do not tell where documents begin: row {row} holds position {int(host[row, column])} "
            f"at token {column}, the first document begins at {int(first[0])}.",
            why=["a jump may be a new document or one that skips positions; transformers' masks and kernels disagree"],
            do="Send packed_layout or cu_seq_lens_q with them, or let each document count from 0.",
        )
