"""Where the true tokens of a padded batch lie, and the way between its shape and one row without pads.

Shape letters: B rows, L row length, T true tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import InvalidLayout
from ..layout import PackedLayout

# What a mask carries once its rows are known: no later call reads it again.
_KNOWN = "_trl_packfa_rows"


def remember(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Hang what was read from a tensor on it, for as long as nobody writes to it."""
    if tensor.is_inference():  # torch does not count the writes to it
        return
    # What is written through `.data` or numpy torch does not count either: on a CPU a copy tells.
    copied = tensor.detach().clone() if tensor.device.type == "cpu" else None
    setattr(tensor, name, (tensor._version, copied, value))


def remembered(tensor: torch.Tensor, name: str) -> Any:
    """Return what was read from a tensor before, `None` if nothing was or the tensor has been written to since."""
    known = None if tensor.is_inference() else getattr(tensor, name, None)
    if known is None or known[0] != tensor._version:
        return None
    return known[2] if known[1] is None or torch.equal(known[1], tensor.detach()) else None


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The true tokens of each row of a padded batch: `lengths[i]` of them, from column `starts[i]` on.

    Two rows of five, the first with a pad on either side, the second without:

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

    Args:
        shape (`tuple[int, int]`):
            `(B, L)`.
        starts (`tuple[int, ...]`), lengths (`tuple[int, ...]`):
            Of each row, on the host. A row of pads alone has a length of 0.
        widths (`tuple[int, ...]`, *optional*):
            Of each row, how long it is in the padded run, where a step was re-cut; L in any other batch.
    """

    shape: tuple[int, int]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    widths: tuple[int, ...] | None = None
    # Index and layout on each device that asked, apart for calls under `torch.inference_mode()`: autograd takes no
    # tensor that was made there.
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> PaddedRows:
        """The rows of an `attention_mask` `(B, L)`; copies it to the host.

        Raises:
            [`InvalidLayout`]: if it holds no values, or a row has pads among its tokens.
        """
        if mask.device.type == "meta":
            raise InvalidLayout(
                "the attention_mask lies on the meta device and holds no values.", do="Send it on the model's device."
            )
        # Compared on the device, so that one byte a token crosses to the host, not the eight of an int64 mask.
        host = mask.detach().cpu().numpy() if mask.dtype == torch.bool else mask.detach().ne(0).cpu().numpy()
        # `argmax` of bools is the first that is true. For [0, 1, 1, 1, 0] start is 1 and end 5 - 1 = 4, of 3 tokens:
        # no hole. For [1, 0, 1, 1, 0] they are 0 and 4, of 3 tokens: a hole.
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
        """T."""
        return sum(self.lengths)

    @property
    def num_pads(self) -> int:
        """Places of the batch that hold no token."""
        return self.shape[0] * self.shape[1] - self.num_tokens

    @property
    def num_packed(self) -> int:
        """Tokens of the row without pads: T, where rows share none."""
        return self.num_tokens

    def own_tokens(self, row: int) -> int:
        """How many tokens at its end a row has to itself."""
        return self.lengths[row]

    def layout(self, device: torch.device) -> PackedLayout:
        """The row without pads, `(1, T)`: each padded row that has tokens is a document."""
        key = ("layout", device, torch.is_inference_mode_enabled())
        if key not in self.memo:
            self.memo[key] = PackedLayout.from_lengths([n for n in self.lengths if n], device=device)
        return self.memo[key]

    def index(self, device: torch.device) -> torch.Tensor:
        """The number of each true token among the `B * L` places, int64, shape `(T,)`."""
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
        """The place of each token of the row without pads among the `B * L`, int64, `(num_packed,)`."""
        return self.index(device)

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """Positions that count each row's tokens from 0, int64, shape `(B, L)`; 0 at pads before them."""
        starts = torch.tensor(self.starts, device=device)[:, None]
        return (torch.arange(self.shape[1], device=device) - starts).clamp(min=0)

    def padded_lengths(self, device: torch.device) -> torch.Tensor:
        """How long the padded run's row is of each token of the row without pads, `(1, num_packed)`; one number where
        all are alike."""
        if self.widths is None:
            return torch.tensor(self.shape[1], device=device)
        return self.take(torch.tensor(self.widths, device=device)[:, None].expand(self.shape))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The true tokens `(1, T, ...)` of `(B, L, ...)`."""
        return tensor.flatten(0, 1).index_select(0, self.packed_index(tensor.device))[None]

    def put_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(B, L, ...)` of `(1, T, ...)`, zeros at pads."""
        return self._put_back(tensor[0]).view(*self.shape, *tensor.shape[2:])

    def _put_back(self, flat: torch.Tensor) -> torch.Tensor:
        places = flat.new_zeros((self.shape[0] * self.shape[1], *flat.shape[1:]))
        return places.index_copy(0, self.index(flat.device), flat)

    def take_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments for the row without pads: every `(B, L, ...)`, also behind an axis of position kinds."""
        return {name: self._take_argument(value) for name, value in call.items() if name != "attention_mask"}

    def _take_argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == self.shape:
            return self.take(value)
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[1:] == self.shape:
            return torch.cat([self.take(axis) for axis in value])[:, None]  # (3, B, L): time, height, width
        return value

    def put_back_outputs(self, outputs: Any) -> Any:
        """A backbone's outputs in the padded batch's shape: `(1, T, ...)` to `(B, L, ...)`, router logits `(T, X)` to
        `(B * L, X)`, inside tuples and transformers' outputs too."""
        if isinstance(outputs, dict):
            values = {name: self.put_back_outputs(value) for name, value in outputs.items()}
            return type(outputs)(**values)  # type: ignore[arg-type]
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(self.put_back_outputs(value) for value in outputs)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() < 2:
            return outputs
        # Other tensors are of no token: a loss, a cache, what an indexer keeps.
        if outputs.shape[:2] == (1, self.num_packed):
            return self.put_back(outputs)
        return self._put_back(outputs) if outputs.shape[0] == self.num_packed else outputs


def rows_of(mask: torch.Tensor) -> PaddedRows:
    """[`PaddedRows.from_mask`], read once for each mask: the policy's call and its reference's share it."""
    known = remembered(mask, _KNOWN)
    if known is None:
        known = PaddedRows.from_mask(mask)
        remember(mask, _KNOWN, known)
    return known


def tell_rows(mask: torch.Tensor, rows: PaddedRows) -> None:
    """Let a mask's rows be known without reading it, as its collator has counted them on the host."""
    remember(mask, _KNOWN, rows)


def as_rows(call: dict[str, Any], shape: tuple[int, int]) -> None:
    """Expand a call's arguments of one row `(1, L, ...)`, as positions that all rows share, to the batch's `(B, L)`,
    in place; also behind an axis of position kinds. transformers' own code lets them broadcast."""
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
    """Rows of these lengths padded to `width`, on the right or on the left."""
    starts = tuple(width - length if left else 0 for length in lengths)
    return PaddedRows((len(lengths), width), starts, tuple(lengths))
