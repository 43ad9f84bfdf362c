"""Refuse call arguments that contradict the document boundaries, by name and without guessing.

Shape letters: B rows, L row length, S documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import InvalidLayout, differing, shown
from .packed import PackedLayout

# Text, time, height, width: the axes that transformers' multimodal decoders take for packed text.
_MULTIMODAL_AXES = 4


def require_offsets(call: dict[str, Any], name: str) -> torch.Tensor:
    """Return FlashAttention's offsets of this name, or raise [`InvalidLayout`] if they are no tensor of integers."""
    offsets = call[name]
    if not isinstance(offsets, torch.Tensor):
        raise InvalidLayout(f"{name} is a {type(offsets).__name__}, not a tensor.", do="Send an int32 tensor.")
    _require_integers(offsets, name)
    return offsets


def host_positions(position_ids: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return `position_ids` as int64 of shape `(B, L)` on the host.

    Of four multimodal axes (text, time, height, width) the text's is returned. Three axes do not count tokens, so the
    result is `None`. Raise [`InvalidLayout`] if they are not positions of a
    batch of this shape.
    """
    if position_ids.dim() == 3 and position_ids.shape[0] != _MULTIMODAL_AXES:
        return None
    _require_integers(position_ids, "position_ids")
    text = position_ids[0] if position_ids.dim() == 3 else position_ids
    text = text[None] if text.dim() == 1 else text
    if text.dim() != 2 or text.shape[0] not in (1, shape[0]) or text.shape[1] != shape[1]:
        raise InvalidLayout(
            f"position_ids have shape {tuple(position_ids.shape)}, the batch has {shape[0]} x {shape[1]} tokens.",
            do="Send one position for each token.",
        )
    # In int64, so that "predecessor plus one" does not overflow in the caller's dtype.
    return text.detach().cpu().long().expand(shape)


def refuse_contradictions(
    layout: PackedLayout, call: dict[str, Any], *, ignores_position_ids: bool, max_positions: int | None
) -> None:
    """Raise [`InvalidLayout`] for arguments that contradict the layout, that of the first source of boundaries.

    The options are those of [`~from_call.layout_of`].
    """
    mask = call.get("attention_mask")
    if mask is not None and not (is_ones(mask) and mask.shape == (layout.rows, layout.row_length)):
        raise InvalidLayout(
            "document boundaries came with an attention_mask that is not all ones, one for each token.",
            do="Drop the attention_mask: padding is a trailing document with labels -100.",
        )
    if call.get("packed_layout") is not None:
        # The boundaries are known, and reading tensors on a device would make the host wait.
        call = {name: value for name, value in call.items() if not isinstance(value, torch.Tensor) or value.is_cpu}
        _refuse_other_offsets(layout, call)
    _refuse_short_maximum(layout, call)
    if (position_ids := call.get("position_ids")) is not None:
        _refuse_positions(layout, position_ids, ignores_position_ids, max_positions)
    if (seq_idx := call.get("seq_idx")) is not None:
        _refuse_other_numbers(layout, seq_idx)


def refuse_incomplete(call: dict[str, Any]) -> None:
    """Raise [`InvalidLayout`] for boundaries without the main argument: the model would ignore them."""
    names = [name for name in ("cu_seq_lens_k", "seq_idx") if call.get(name) is not None]
    numbers: Any = call.get("seq_idx")
    # TRL sends `seq_idx` with every row. If all numbers of a row are equal, it holds one document.
    is_readable = isinstance(numbers, torch.Tensor) and numbers.dim() == 2 and numbers.device.type != "meta"
    if is_readable and not bool((numbers != numbers[:, :1]).any()):
        names.remove("seq_idx")
    if names:
        raise InvalidLayout(
            f"{', '.join(names)} came without cu_seq_lens_q, packed_layout or position_ids that restart.",
            do="Send all of TRL's keys: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx.",
        )


def refuse_restarts_under_padding(host: torch.Tensor, mask: Any) -> None:
    """Raise [`InvalidLayout`] for positions that restart under a mask of padding."""
    if not isinstance(mask, torch.Tensor) or mask.shape != host.shape or mask.device.type == "meta":
        return
    if found := _first_restart(host, mask):
        raise InvalidLayout(
            f"position_ids restart at token {found[1]} of row {found[0]} under an attention_mask with zeros.",
            why=["transformers ignores positions there: the documents of the row would see each other"],
            do="Drop the attention_mask: padding is a trailing document with labels -100.",
        )


def refuse_filled_cache(call: dict[str, Any], shape: tuple[int, int], cache: str) -> None:
    """Raise [`InvalidLayout`] for several documents in a row beside a filled cache: each would see the cached tokens.

    `shape` is `(B, L)` of the call's tokens, `cache` the name of the argument with the cache.
    """
    if shape[1] < 2:  # `generate()` calls token by token: do not read tensors back from the device
        return
    offsets, layout = call.get("cu_seq_lens_q"), call.get("packed_layout")
    if getattr(layout, "num_documents", 0) > shape[0]:
        boundaries = "packed_layout"
    elif isinstance(offsets, torch.Tensor) and offsets.numel() - 1 > shape[0]:
        boundaries = "cu_seq_lens_q"
    elif _restarts(call.get("position_ids"), call.get("attention_mask"), shape):
        boundaries = "position_ids that restart"
    else:
        return
    raise InvalidLayout(
        f"{boundaries} came with a filled {cache}.",
        why=["every document of the row would see the cached tokens"],
        do=f"Drop {cache} (prefix tuning and cartridges fill it), or pass the documents as a padded batch.",
    )


def _restarts(positions: Any, mask: Any, shape: tuple[int, int]) -> bool:
    """Tell whether positions go back among the tokens of the mask, which covers cached tokens, too."""
    if not isinstance(positions, torch.Tensor) or positions.shape[-1:] != shape[1:] or positions.is_floating_point():
        return False
    host = None if positions.device.type == "meta" else host_positions(positions, shape)
    if host is None:
        return False
    # The call's own tokens are the last columns.
    known = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= shape[1]
    return _first_restart(host, mask[:, -shape[1] :] if known else torch.ones_like(host)) is not None


def _first_restart(host: torch.Tensor, mask: torch.Tensor) -> tuple[int, int] | None:
    """Return row and token of the first position that goes back among the tokens of a mask."""
    for row, (positions, real) in enumerate(zip(host, mask.cpu().bool(), strict=True)):
        columns = real.nonzero().flatten()
        back = (positions[columns].diff() <= 0).nonzero().flatten()
        if len(back):
            return row, int(columns[back[0] + 1])
    return None


def refuse_numbered_mask(mask: Any) -> None:
    """Raise [`InvalidLayout`] for a mask of padding with document numbers: transformers would read each as a one."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.dtype == torch.bool or not mask.numel():
        return
    if mask.device.type != "meta" and mask.shape[1] > 1 and (largest := mask.max().item()) > 1:
        raise InvalidLayout(
            f"the attention_mask holds values up to {largest:g}, which look like numbers of documents.",
            why=["transformers attends to every token whose value is not 0: documents would see each other"],
            do="Send position_ids that restart at 0, cu_seq_lens_q or packed_layout, and no attention_mask.",
        )


def is_ones(mask: Any) -> bool:
    """Tell whether a mask of padding hides nothing."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())


def _require_readable(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type == "meta":
        raise InvalidLayout(
            f"{name} lie on the meta device and hold no values.",
            do="Send them on the model's device, or packed_layout, whose lengths are known on the host.",
        )


def _require_integers(tensor: torch.Tensor, name: str) -> None:
    _require_readable(tensor, name)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InvalidLayout(f"{name} are {tensor.dtype}, not integers.", do="Send int32 or int64.")


def _refuse_other_offsets(layout: PackedLayout, call: dict[str, Any]) -> None:
    """Refuse `cu_seq_lens_*` that contradict a `packed_layout`; without one they are the source of the layout."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if call.get(name) is None or call[name] is layout.cu_seqlens:
            continue
        # Lengths are compared, not offsets: some collators pad `cu_seq_lens_*` to a fixed size by repeated offsets.
        given = PackedLayout.from_cu_seqlens(require_offsets(call, name)).lengths
        if given != layout.lengths:
            raise _disagree(f"packed_layout and {name} disagree: lengths {differing(layout.lengths, given)}.")


def _refuse_short_maximum(layout: PackedLayout, call: dict[str, Any]) -> None:
    """Refuse a `max_length_*` that is too short: a kernel would leave out tokens. A longer one is harmless."""
    for name in ("max_length_q", "max_length_k"):
        longest = call.get(name)
        if isinstance(longest, torch.Tensor):
            if longest.device.type != "cpu":
                continue
            longest = longest.item() if longest.numel() == 1 else -1
        if longest is not None and longest < layout.max_seqlen:
            raise InvalidLayout(
                f"{name}={longest} is shorter than the longest document, of {layout.max_seqlen} tokens.",
                do=f"Send {layout.max_seqlen} or more, or leave it out.",
            )


def _refuse_positions(
    layout: PackedLayout, position_ids: torch.Tensor, ignores_position_ids: bool, max_positions: int | None
) -> None:
    positions = host_positions(position_ids, (layout.rows, layout.row_length))
    if positions is None:
        return
    host = positions.flatten().numpy()
    if int(host.min()) < 0:
        raise InvalidLayout(
            f"position_ids hold {int(host.min())} in a packed batch.", do="Let each document count from 0."
        )
    if max_positions is not None and int(host.max()) >= max_positions:
        raise InvalidLayout(
            f"position_ids hold {int(host.max())}, the model has {max_positions} positions.",
            do=f"Cut documents to {max_positions} tokens, or let each count from 0.",
        )
    # Documents of lengths [2, 3] begin at tokens 0 and 2, so inside is [0, 1, 0, 1, 1].
    inside = np.ones(layout.num_tokens, dtype=bool)
    inside[np.cumsum((0, *layout.lengths[:-1]))] = False
    wrong = np.flatnonzero(inside[1:] & (host[1:] != host[:-1] + 1))
    if len(wrong):
        at = int(wrong[0]) + 1
        moves = "jump" if host[at] > host[at - 1] else "restart"
        raise _disagree(
            f"boundaries and position_ids disagree: positions {moves} at token {at}, where no document begins "
            f"(lengths {shown(layout.lengths)})."
        )
    begins = host[~inside]
    if ignores_position_ids and begins.any():
        raise InvalidLayout(
            f"position_ids do not count each document from 0: one begins at {int(begins[begins != 0][0])}.",
            why=["this model counts positions by itself, or scales them by a document's length"],
            do="Let positions restart at 0 at each boundary.",
        )


def _refuse_other_numbers(layout: PackedLayout, seq_idx: torch.Tensor) -> None:
    _require_readable(seq_idx, "seq_idx")
    if seq_idx.shape != (layout.rows, layout.row_length):
        raise InvalidLayout(
            f"seq_idx has shape {tuple(seq_idx.shape)}, the batch has {layout.rows} x {layout.row_length} tokens.",
            do="Send one number for each token, or leave it out.",
        )
    # The places of changes are compared, not the numbers: other packers count from 1, or anew in each row.
    changes, expected = (ids.cpu().diff(dim=1) != 0 for ids in (seq_idx, layout.document_ids()))
    if not torch.equal(changes, expected):
        row, column = (changes != expected).nonzero()[0].tolist()
        where = f"token {column + 1} of row {row} (lengths {shown(layout.lengths)})"
        raise _disagree(f"seq_idx and the boundaries disagree at {where}.")


def _disagree(what: str) -> InvalidLayout:
    return InvalidLayout(what, do="Send both from one collator, or only one of them.")
