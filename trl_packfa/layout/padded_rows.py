"""The places of the true tokens in a padded batch, and conversion between its shape and one row without pads.

Shape letters: B rows, L row length, T true tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import InvalidLayout
from .packed import PackedLayout

# Attribute of a mask whose rows are known.
_KNOWN = "_trl_packfa_rows"
# Arguments of text decoders with features of images for single layers, a list or dictionary by layer, and the mask of
# their places before them: one feature for each, in the order of the rows (Qwen3-VL; Granite 4 Vision).
_BY_IMAGE_TOKEN = (("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features"))


def remember(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Attach to a tensor what was read from it; it is valid until somebody writes to the tensor."""
    if tensor.is_inference():  # torch does not count writes to such a tensor
        return
    # torch does not count writes through `.data` or numpy either. On a CPU they are found by comparing with a copy.
    copied = tensor.detach().clone() if tensor.device.type == "cpu" else None
    setattr(tensor, name, (tensor._version, copied, value))


def remembered(tensor: torch.Tensor, name: str) -> Any:
    """Return what was read from a tensor before, `None` if nothing was or the tensor has changed since."""
    known = None if tensor.is_inference() else getattr(tensor, name, None)
    if known is None or known[0] != tensor._version:
        return None
    return known[2] if known[1] is None or torch.equal(known[1], tensor.detach()) else None


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The true tokens of a padded batch: row i has `lengths[i]` of them, from column `starts[i]` on.

    An example with two rows of five, the first with a pad on each side, the second without pads:

    ```python
    >>> rows = PaddedRows.from_mask(torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]))
    >>> rows.starts, rows.lengths, rows.shape, rows.num_tokens
    ((1, 0), (3, 5), (2, 5), 8)
    >>> rows.take(torch.arange(10).view(2, 5))
    tensor([[1, 2, 3, 5, 6, 7, 8, 9]])
    >>> rows.put_back(torch.ones(1, 8, dtype=torch.long))
    tensor([[0, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]])
    ```
    """

    shape: tuple[int, int]  # of the batch, `(B, L)`
    # First column and number of tokens of each row. A row of only pads has a length of 0.
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    # Length of each row in the padded run, if the step was re-cut. In any other batch it is L.
    widths: tuple[int, ...] | None = None
    # Index and layout for each device; under `torch.inference_mode()` others, as autograd does not accept tensors that
    # were made there.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> PaddedRows:
        """Make the rows of an `attention_mask` `(B, L)`; this copies the mask to the host.

        Raise [`InvalidLayout`] if it holds no values, or a row has pads among its tokens.
        """
        if mask.device.type == "meta":
            raise InvalidLayout(
                "the attention_mask lies on the meta device and holds no values.", do="Send it on the model's device."
            )
        # Compared on the device, so that one byte for each token is copied to the host, not the eight of an int64.
        host = mask.detach().cpu().numpy() if mask.dtype == torch.bool else mask.detach().ne(0).cpu().numpy()
        # `argmax` of bools is the first true one. [0, 1, 1, 1, 0] starts at 1 and ends at 5 - 1 = 4, with 3 tokens:
        # no hole. [1, 0, 1, 1, 0] starts at 0 and ends at 4, with 3 tokens: a hole.
        lengths, starts = host.sum(1), host.argmax(1)
        ends = host.shape[1] - host[:, ::-1].argmax(1)
        holes = np.flatnonzero((lengths > 0) & (ends - starts != lengths))
        if len(holes):
            row = int(holes[0])
            gap = int(starts[row]) + int(host[row, starts[row] :].argmin())
            raise InvalidLayout(
                f"the attention_mask has a hole: row {row} has {int(lengths[row])} tokens between columns "
                f"{int(starts[row])} and {int(ends[row])}, and a 0 at column {gap}.",
                why=["without its pads a row is one document, whose positions count by one"],
                do="Pad rows at their ends, or patch the model with unpad=False.",
            )
        shape = (host.shape[0], host.shape[1])
        return cls(shape, tuple(map(int, starts)), tuple(map(int, lengths)))

    @property
    def num_tokens(self) -> int:
        """Number of true tokens, T."""
        return sum(self.lengths)

    @property
    def num_pads(self) -> int:
        """Number of places in the batch without a token."""
        return self.shape[0] * self.shape[1] - self.num_tokens

    @property
    def num_packed(self) -> int:
        """Number of tokens in the row without pads: T if rows share none."""
        return self.num_tokens

    def own_tokens(self, row: int) -> int:
        """Return the number of tokens at the end of a row that no other row shares."""
        return self.lengths[row]

    def layout(self, device: torch.device) -> PackedLayout:
        """Return the layout of the row without pads, `(1, T)`: each padded row that has tokens is a document."""
        key = ("layout", device, torch.is_inference_mode_enabled())
        if key not in self.memo:
            self.memo[key] = self._make_layout(device)
        return self.memo[key]

    def _make_layout(self, device: torch.device) -> PackedLayout:
        return PackedLayout.from_lengths([n for n in self.lengths if n], device=device)

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the index of each true token among the `B * L` places, int64, shape `(T,)`."""
        key = ("index", device, torch.is_inference_mode_enabled())
        if key not in self.memo:
            # Two rows of 5 with starts (1, 0) and lengths (3, 5): [1, 2, 3] and [5, 6, 7, 8, 9].
            places = [
                np.arange(start, start + length) + row * self.shape[1]
                for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True))
            ]
            self.memo[key] = torch.from_numpy(np.concatenate(places)).to(device, non_blocking=True)
        return self.memo[key]

    def packed_index(self, device: torch.device) -> torch.Tensor:
        """Return the place of each token of the row without pads among the `B * L`, int64, `(num_packed,)`."""
        return self.index(device)

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """Return positions that count each row's tokens from 0, int64, shape `(B, L)`; 0 at pads before."""
        starts = torch.tensor(self.starts, device=device)[:, None]
        return (torch.arange(self.shape[1], device=device) - starts).clamp(min=0)

    def padded_lengths(self, device: torch.device) -> torch.Tensor:
        """Return each packed token's row length in the padded run, `(1, num_packed)`; one number if all are equal."""
        if self.widths is None:
            return torch.tensor(self.shape[1], device=device)
        return self.take(torch.tensor(self.widths, device=device)[:, None].expand(self.shape))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the true tokens `(1, T, ...)` of a tensor `(B, L, ...)`."""
        return tensor.flatten(0, 1).index_select(0, self.packed_index(tensor.device))[None]

    def put_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor `(B, L, ...)` with the tokens of `(1, T, ...)` at their places, zeros at pads."""
        return self._put_back(tensor[0]).view(*self.shape, *tensor.shape[2:])

    def _put_back(self, flat: torch.Tensor) -> torch.Tensor:
        places = flat.new_zeros((self.shape[0] * self.shape[1], *flat.shape[1:]))
        return places.index_copy(0, self.index(flat.device), flat)

    def take_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments for the row without pads: every tensor with a [`PaddedRows.row_axis`] changes."""
        taken = {name: value for name, value in call.items() if name != "attention_mask"}
        for name, value in taken.items():
            axis = self.row_axis(value)
            if axis == 0:
                taken[name] = self.take(value)
            elif axis == 1:
                taken[name] = torch.cat([self.take(kind) for kind in value])[:, None]
        return taken

    def row_axis(self, value: Any) -> int | None:
        """Return the axis of the rows in an argument per token, `None` for any other argument.

        It is 0 in `(B, L, ...)`, and 1 in `(3, B, L)`, where kinds of positions (time, height, width) come first.
        """
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return None
        if value.shape[:2] == self.shape:
            return 0
        return 1 if value.dim() == 3 and value.shape[1:] == self.shape else None

    def row_of_call(self, call: Mapping[str, Any], row: int) -> dict[str, Any]:
        """Return a call's arguments for one row by itself, without its pads.

        Positions that count tokens are left out, as the model counts them so by itself; those with an axis of kinds
        are kept.
        """
        part = slice(self.starts[row], self.starts[row] + self.lengths[row])
        own: dict[str, Any] = {}
        for name, value in call.items():
            axis = self.row_axis(value)
            if axis == 1:
                own[name] = value[:, row : row + 1, part]
            elif name not in ("attention_mask", "position_ids"):
                own[name] = value if axis is None else value[row : row + 1, part]
        for mask, name in _BY_IMAGE_TOKEN:
            places, features = call.get(mask), call.get(name)
            if places is not None and features is not None:
                start = int(places[:row].sum())
                mine = slice(start, start + int(places[row].sum()))
                by_layer = features.items() if isinstance(features, dict) else enumerate(features)
                sliced = {layer: feature[mine] for layer, feature in by_layer}
                own[name] = sliced if isinstance(features, dict) else list(sliced.values())
        return own

    def put_back_outputs(self, outputs: Any) -> Any:
        """Return a backbone's outputs in the padded batch's shape, inside tuples and transformers' outputs, too.

        `(1, T, ...)` becomes `(B, L, ...)`, router logits `(T, X)` become `(B * L, X)`.
        """
        if isinstance(outputs, dict):
            values = {name: self.put_back_outputs(value) for name, value in outputs.items()}
            return type(outputs)(**values)  # type: ignore[arg-type]
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(self.put_back_outputs(value) for value in outputs)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() < 2:
            return outputs
        # Other tensors are not per token: a loss, a cache, the state of an indexer.
        if outputs.shape[:2] == (1, self.num_packed):
            return self.put_back(outputs)
        return self._put_back(outputs) if outputs.shape[0] == self.num_packed else outputs


def rows_of(mask: torch.Tensor) -> PaddedRows:
    """Return [`PaddedRows.from_mask`], read once for each mask: policy and reference model share it."""
    known = remembered(mask, _KNOWN)
    if known is None:
        known = PaddedRows.from_mask(mask)
        remember(mask, _KNOWN, known)
    return known


def tell_rows(mask: torch.Tensor, rows: PaddedRows) -> None:
    """Attach the rows of a mask to it without reading it: its collator has counted them on the host."""
    remember(mask, _KNOWN, rows)


def as_rows(call: dict[str, Any], shape: tuple[int, int]) -> None:
    """Expand arguments with one row, `(1, L, ...)` or `(kinds, 1, L)`, to the batch's B rows, in place.

    transformers' own code broadcasts them: positions that all rows share are an example.
    """
    rows, length = shape
    for name, value in call.items():
        if not isinstance(value, torch.Tensor) or rows == 1:
            continue
        if name == "position_ids" and value.shape == (length,):
            call[name] = value.expand(shape)
        elif value.dim() >= 2 and value.shape[:2] == (1, length):
            call[name] = value.expand(rows, *value.shape[1:])
        elif value.dim() == 3 and value.shape[1:] == (1, length):
            call[name] = value.expand(-1, rows, -1)


def rows_of_lengths(lengths: Sequence[int], width: int, *, left: bool = False) -> PaddedRows:
    """Make rows of these lengths, padded to `width` on the right or on the left."""
    starts = tuple(width - length if left else 0 for length in lengths)
    return PaddedRows((len(lengths), width), starts, tuple(lengths))
