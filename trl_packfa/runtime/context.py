"""How a layout gets from the backbone, which has found it, to the modules below: [`find_layout`] reads it anywhere.

No one carrier reaches them all, so the backbone sends it by three:
- the keyword `packed_layout`, where layers take further keywords: a backward pass recomputes checkpointed layers from
  their arguments alone, outside of any call, and reentrant checkpoints strip tensors of what rides on them;
- the mask, the argument that transformers hands to layers which take no others;
- the context, for what is handed neither: rotary embeddings, state, backbones whose causal LM keeps its arguments, and
  layers in a compiled graph, which makes masks over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..layout import PackedLayout

# Where a layout's memo holds the tokens of its call `(B, L)`, for layers that depend on what they read.
INPUT_IDS = "input_ids"

# A context variable belongs to one thread. Autograd runs the backward of accelerators in threads of its own, so that
# layers which a checkpoint recomputes there find nothing here: they need the keyword or the mask.
_IN_FLIGHT: ContextVar[PackedLayout | None] = ContextVar("trl_packfa_layout", default=None)


def current_layout() -> PackedLayout | None:
    """The layout of the call that this thread is in, `None` outside of packed calls."""
    return _IN_FLIGHT.get()


@contextmanager
def packed_call(layout: PackedLayout | None) -> Iterator[None]:
    """For the length of a `with` block this thread's call has this layout."""
    token = _IN_FLIGHT.set(layout)
    try:
        yield
    finally:
        _IN_FLIGHT.reset(token)


def empty_mask(layout: PackedLayout, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What takes the place of a mask in a packed call: four-dimensional, so that transformers builds none, and without
    elements, so that attention which the patch has missed fails instead of leaking. It carries the layout."""
    # Added to scores `(B, N, L, L)` it raises, as a size of 0 does not broadcast against L. transformers hands every
    # mask of four dimensions through as it is (`_preprocess_mask_arguments`).
    mask: Any = torch.empty((1, 1, 0, 0), device=device, dtype=dtype)
    mask.packed_layout = layout
    return mask


def is_empty_mask(value: Any) -> bool:
    """Whether a value is [`empty_mask`], or a slice of one."""
    return isinstance(value, torch.Tensor) and value.dim() >= 3 and value.shape[-2:] == (0, 0)


def find_layout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedLayout | None:
    """The layout that came with a module's arguments, by name or on the mask, else that of this thread's call."""
    layout = kwargs.get("packed_layout")
    if layout is not None:
        return layout
    # A slice or a cast of the mask is a new tensor without the attribute: then the context variable answers.
    mask = next((value for value in (*args, *kwargs.values()) if hasattr(value, "packed_layout")), None)
    return current_layout() if mask is None else mask.packed_layout
